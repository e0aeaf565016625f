"""What `instrument doctor` says of this environment: versions, known clashes and their fixes, and what works on the device.

Owns the rules on versions, and how a trial is started and what it is allowed to do. `trials.py` is what runs there: in a
process of its own, because a MindSpore that does not go with its driver or its NumPy can end the process that imports it. This
module does not import MindSpore.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from instrument.environment import version_of
from instrument.supported import PAIRS, PYTHONS

__all__ = ["Finding", "clashes", "extras", "installed", "trials"]

BUILDS = ("mindspore", "mindspore-ascend", "mindspore-gpu")
EXTRAS = {"nicegui": ("the live view and reports", "dashboard"), "prometheus-client": ("PrometheusWriter", "prometheus"),
          "wandb": ("WandbWriter", "wandb"), "mlflow-skinny": ("MlflowWriter", "mlflow"),
          "swanlab": ("SwanLabWriter", "swanlab")}
_NAMES = ("mindspore-instrument", *BUILDS, "mindformers", "numpy", "pillow", "protobuf", "setuptools", "tensorboard", *EXTRAS)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or that one should know.

    Attributes:
        says: What is the matter.
        fix: The one line that mends it; empty where there is none.
        is_problem: Whether something does not work because of it.
    """

    says: str
    fix: str = ""
    is_problem: bool = True


def installed() -> dict[str, str]:
    """Versions of the distributions that matter here, `{name: version}`; what is not installed is absent."""
    found = {name: version_of(name) for name in _NAMES}
    return {name: version for name, version in found.items() if version is not None}


def clashes(versions: Mapping[str, str], python: str, requirements: Mapping[str, list[str]] | None = None) -> list[Finding]:
    """What is known not to go together.

    Args:
        versions: `{distribution: version}`, as `installed` returns it.
        python: `"3.11"`.
        requirements: `{distribution: what it says that it needs}`; by default as the installed distributions say it.

    Returns:
        Problems first.
    """
    builds = [name for name in BUILDS if name in versions]
    found = _of_mindspore(versions, builds, python)
    release = _version(versions.get(builds[0], "")) if builds else None
    if release is not None and "numpy" in versions and Version(versions["numpy"]) >= Version("2"):
        found.append(Finding(f"NumPy {versions['numpy']}: MindSpore fails with it in ops.norm, and in asnumpy of bfloat16.",
                             'pip install "numpy<2"'))
    if release is not None and release < Version("2.1") and _at_least(versions, "pillow", "10"):
        found.append(Finding(f"Pillow {versions['pillow']}: MindSpore {release} cannot be imported with Pillow 10 and later.",
                             'pip install "pillow<10"'))
    if "mindformers" in versions:
        found += _of_mindformers(versions, release)
    for name in (*builds, "mindformers"):
        if name in versions:
            found += _unmet(name, versions, (requirements or {}).get(name) if requirements is not None else _requires(name))
    return sorted(dict.fromkeys(found), key=lambda finding: not finding.is_problem)


def _of_mindspore(versions: Mapping[str, str], builds: list[str], python: str) -> list[Finding]:
    if not builds:
        oldest, newest = PYTHONS[max(PYTHONS, key=Version)]
        if not any(Version(low) <= Version(python) <= Version(high) for low, high in PYTHONS.values()):
            return [Finding(f"MindSpore is not installed, and has no build for Python {python}.",
                            f"python{newest} -m venv .venv      # {oldest} to {newest} for the newest release")]
        return [Finding("MindSpore is not installed.", 'pip install "mindspore-instrument[mindspore]"      # for a CPU')]
    found = []
    if len(builds) > 1:
        found.append(Finding(f"{' and '.join(builds)} are installed, and write over each other's files.",
                             f"pip uninstall -y {' '.join(builds)}, and then install one of them"))
    if versions[builds[0]].split("+")[0] not in PYTHONS:
        found.append(Finding(f"MindSpore {versions[builds[0]]} has not been tested; tested: {', '.join(PYTHONS)}.",
                             is_problem=False))
    return found


def _of_mindformers(versions: Mapping[str, str], release: Version | None) -> list[Finding]:
    found, name = [], versions["mindformers"]
    if _at_least(versions, "setuptools", "81"):
        found.append(Finding(f"setuptools {versions['setuptools']}: MindFormers needs pkg_resources, which it has no more.",
                             'pip install "setuptools<81"'))
    if name not in PAIRS:
        found.append(Finding(f"MindFormers {name} has not been tested; tested: {', '.join(PAIRS)}.", is_problem=False))
    elif release is not None and str(release) != PAIRS[name]:
        found.append(Finding(f"MindFormers {name} has been tested with MindSpore {PAIRS[name]}; this is {release}.",
                             is_problem=False))
    return found


def _unmet(name: str, versions: Mapping[str, str], requirements: list[str] | None) -> list[Finding]:
    """What the distribution says that it needs and that is here in another version; what is missing its import tells."""
    found = []
    for line in requirements or ():
        try:
            needed = Requirement(line)
            here = _version(versions.get(needed.name.lower()) or version_of(needed.name) or "")
            if here is None or (needed.marker is not None and not needed.marker.evaluate({"extra": ""})):
                continue
            if not needed.specifier.contains(here, prereleases=True):
                held = ',<2' if needed.name.lower() == "numpy" else ""
                found.append(Finding(f"{needed.name} {here}: {name} {versions[name]} needs {needed.specifier}.",
                                     f'pip install "{needed.name}{needed.specifier}{held}"'))
        except InvalidRequirement:
            continue
    return found


def _requires(name: str) -> list[str] | None:
    try:
        return metadata.requires(name)
    except metadata.PackageNotFoundError:
        return None


def _at_least(versions: Mapping[str, str], name: str, least: str) -> bool:
    here = _version(versions.get(name, ""))
    return here is not None and here >= Version(least)


def _version(text: str) -> Version | None:
    try:
        return Version(text.split("+")[0])
    except InvalidVersion:
        return None


def extras(versions: Mapping[str, str]) -> list[Finding]:
    """What could be installed besides."""
    missing = [Finding(f"{what}: {name} is not installed.", f'pip install "mindspore-instrument[{extra}]"', is_problem=False)
               for name, (what, extra) in EXTRAS.items() if name not in versions]
    if "tensorboard" not in versions:
        missing.append(Finding("instrument tensorboard: tensorboard is not installed.", "pip install tensorboard",
                               is_problem=False))
    return missing


def trials(modes: tuple[str, ...] = ("graph", "pynative"), device: str | None = None, seconds: float = 300.0,
           command: tuple[str, ...] = (sys.executable, "-m", "instrument.trials")) -> Iterator[dict[str, Any]]:
    """Train with each option for three steps, in a process for each mode, and hold its numbers against NumPy.

    Args:
        modes: Of `"graph"` and `"pynative"`.
        device: `"Ascend"`, `"GPU"` or `"CPU"`; by default what MindSpore takes.
        seconds: A process that takes longer is ended.
        command: For tests.

    Yields:
        As they come, `{"mode", "mindspore", "device"}` when MindSpore has been imported, then for each option `{"mode",
        "option", "error"}`, the largest relative error of a number against its float64 twin, or `{"mode", "option",
        "failed"}`, what went wrong in a line. Last, where the process did not come to its end, `{"mode", "failed"}`.
    """
    for mode in modes:
        ended = False
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            with subprocess.Popen([*command, mode, *([device] if device else [])], stdout=subprocess.PIPE, stderr=errors,
                                  text=True, errors="replace", env={"GLOG_v": "3", **os.environ}) as child:
                late = threading.Timer(seconds, child.kill)
                late.start()
                try:
                    assert child.stdout is not None
                    for line in child.stdout:
                        if line.startswith("{"):  # MindSpore prints too
                            said = json.loads(line)
                            ended = ended or "end" in said
                            if "end" not in said:
                                yield {"mode": mode, **said}
                    status = child.wait()
                finally:
                    late.cancel()
                    child.kill()
            if not ended:
                errors.seek(0)
                lines = [line.strip() for line in errors if line.strip()]
                yield {"mode": mode, "failed": _why(status, lines, seconds)}


def _why(status: int, lines: list[str], seconds: float) -> str:
    last = lines[-1] if lines else "it printed nothing"
    if status == -9:
        return f"the process was killed: out of memory, or longer than {seconds:.0f} s. Last line: {last}"
    return f"the process ended with {f'signal {-status}' if status < 0 else f'status {status}'}: {last}"
