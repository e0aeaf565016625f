"""How `instrument doctor` shows what `doctor.py` finds: three short tables in a terminal, or plain lines in a file."""
from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from instrument import doctor
from instrument.environment import hardware, version_of

TOLERANCE = 1e-3  # some devices multiply float32 matrices with 10 bits; a wrong reduction is further off
MODES = ("graph", "pynative")
NOT_TRIED = ("Not tried, since they take a job of several processes: scope and ranks, verified in data parallel with 2 and 4 "
             "processes on CPUs, and allow_unverified (shards), of which the arithmetic alone is.")


def show(*, device: str | None = None, trials: bool = True, console: Console | None = None) -> bool:
    """Print what is here, what is wrong with it, and what works.

    Args:
        device: As for `doctor.trials`.
        trials: Whether to train.
        console: Where to; by default the standard output.

    Returns:
        Whether nothing is wrong.
    """
    console = console or Console(highlight=False)
    versions = doctor.installed()
    python = platform.python_version()
    console.print(f"Python {python}, {platform.system()} {hardware()}; instrument "
                  f"{version_of('mindspore-instrument') or 'of a source checkout'}")
    console.print(", ".join(f"{name}\N{NO-BREAK SPACE}{version}" for name, version in versions.items()
                            if name != "mindspore-instrument"))
    found = doctor.clashes(versions, ".".join(python.split(".")[:2]))
    _show_findings(console, "Versions", found)
    is_well = not any(finding.is_problem for finding in found)
    if trials and any(name in versions for name in doctor.BUILDS):
        is_well = _show_trials(console, doctor.trials(MODES, device)) and is_well
    _show_findings(console, "Not installed, and not needed for training", doctor.extras(versions))
    console.print("\nNothing is wrong." if is_well else "\nSomething is wrong.", style="green" if is_well else "red")
    return is_well


def _show_findings(console: Console, title: str, found: list[doctor.Finding]) -> None:
    if not found:
        return
    console.print(f"\n{title}", style="bold")
    for finding in found:
        console.print(Text(("✗ " if finding.is_problem else "- ") + finding.says, "red" if finding.is_problem else ""))
        if finding.fix:
            console.print(Text(f"    {finding.fix}", "bold" if finding.is_problem else "dim"), soft_wrap=True)


def _show_trials(console: Console, said: Iterable[dict[str, Any]]) -> bool:
    """Whether all of it went well. A line a trial where it takes long: in a terminal a status line says what it is at."""
    results: dict[str, dict[str, str]] = {}
    failures = []
    about = ""
    with console.status("Training a tiny network in graph mode...") as status:
        for each in said:
            if "device" in each:
                about = f"MindSpore {each['mindspore']} on {each['device']}"
                status.update(f"{about}: {each['mode']} mode")
            elif "option" in each:
                cell, failure = _result(each)
                results.setdefault(each["option"], {})[each["mode"]] = cell
                failures += [f"{each['option']}, {each['mode']} mode: {failure}"] if failure else []
                status.update(f"{about}: {each['mode']} mode, after {each['option']}")
            else:
                failures.append(f"{each['mode']} mode: {each['failed']}")
    console.print(f"\nOptions, with the largest relative error against NumPy{f': {about}' if about else ''}", style="bold")
    table = Table(box=None, pad_edge=False)
    for column in ("", *MODES):
        table.add_column(column)
    for option, cells in results.items():
        table.add_row(Text(option), *(Text(cells.get(mode, "not tried"), "red" if "✗" in cells.get(mode, "") else "")
                                      for mode in MODES))
    if results:
        console.print(table)
        console.print(Text(NOT_TRIED, "dim"))
    for failure in failures:
        console.print(Text(f"✗ {failure}", "red"))
    return not failures


def _result(said: dict[str, Any]) -> tuple[str, str]:
    """What the table says of a trial, and what is wrong with it, or nothing."""
    if "failed" in said:
        return "✗ failed", said["failed"]
    if not said["error"] <= TOLERANCE:
        return f"✗ {said['error']:.0e}", (f"a number differs from NumPy's by {said['error']:.1e}, more than {TOLERANCE:.0e}: "
                                          "do not trust it here, and report it with this output")
    return f"✓ {said['error']:.0e}", ""
