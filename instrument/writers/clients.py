"""What the writers for experiment trackers share: which run to go on with, names that a tracker takes, histograms.

Owns `clients.json` of the run directory, `{tracker: {"id": ...}}`. Imports no client.
"""
from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from instrument import bins, lines
from instrument.record import RunInfo

FILE = "clients.json"


def stored_id(run: RunInfo, tracker: str) -> str | None:
    """The id that this run has with a tracker, where it goes on with an earlier process's work; None for a new run."""
    if not run.resumed or run.directory is None:
        return None
    return _stored(run.directory).get(tracker, {}).get("id")


def store_id(run: RunInfo, tracker: str, run_id: str) -> None:
    """Keep the id for whoever resumes the run; nothing to do for a run without a directory."""
    if run.directory is None:
        return
    content = {**_stored(run.directory), tracker: {"id": run_id}}
    run.directory.mkdir(parents=True, exist_ok=True)
    lines.replace(run.directory / FILE, content)


def _stored(directory: Path) -> dict[str, Any]:
    try:
        return orjson.loads((directory / FILE).read_bytes())
    except FileNotFoundError:
        return {}


def check_mode(mode: str | None, modes: tuple[str, ...], *, variable: str) -> None:
    """ValueError where `mode` is given and none of `modes`; `variable` decides where it is not given."""
    if mode is not None and mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)}, but it is {mode!r}. Leave it out to have the "
                         f"environment variable {variable}, or offline.")


def hyper_parameters(run: RunInfo) -> dict[str, Any]:
    """The run's hyper-parameters, `{name: number, text or bool}`; empty where it has none."""
    return dict(run.config.get("hyper_parameters") or {})


def accepted_name(name: str, *, refused: re.Pattern[str], longest: int) -> str:
    """A name that a tracker takes: the same one, or one that ends in a checksum of it, so that two never become one.

    Args:
        name: Our name.
        refused: Matches what the tracker does not take; each match becomes `_`.
        longest: How many characters it may have.

    Examples:
        >>> refused = re.compile(r"[^a-z/]")
        >>> accepted_name("grad/norm", refused=refused, longest=40), accepted_name("grad/né", refused=refused, longest=40)
        ('grad/norm', 'grad/n_-9e247c38')
    """
    accepted = refused.sub("_", name)
    if accepted == name and 0 < len(name) <= longest:
        return name
    return f"{accepted[:longest - 9]}-{zlib.crc32(name.encode('utf-8', 'surrogatepass')):08x}"


def trimmed(counts: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """A histogram without the empty bins at its two ends.

    Args:
        counts: int64 [`bins.BINS`].

    Returns:
        Counts, int64 [n]; edges, float64 [n + 1]; and how many elements are not finite, which are in none of them. n is 0
        where no element is finite.
    """
    counts = np.asarray(counts)
    finite, nonfinite = counts[:bins.NONFINITE], int(counts[bins.NONFINITE])
    first, end = bins.occupied(finite)
    return finite[first:end], bins.edges()[first:end + 1], nonfinite


@contextlib.contextmanager
def environment(**defaults: str) -> Iterator[None]:
    """Set what is not set yet in the environment of this process, for the length of a block."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
