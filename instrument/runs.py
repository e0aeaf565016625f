"""The run directory: where the files of one training run lie, and what tells a run from another directory.

    RUN/config.json             what ran: versions, command line, the schema of the metrics
    RUN/metrics-00000.jsonl     one line a record (`instrument.writers.JsonlWriter`)
    RUN/events.out.tfevents.*   the same for TensorBoard (`instrument.writers.TensorBoardWriter`)

Owns names and `config.json`. Writing metrics is the writers' work. Does not import MindSpore, so tools that read runs
start fast and work where it is not installed.
"""
from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from instrument.schema import Metric

CONFIG = "config.json"
METRICS = "metrics-*.jsonl"


def create(path: str | os.PathLike[str]) -> Path:
    """Make the directory of a new run, its parents included, and mark it as taken.

    Args:
        path: A directory that does not exist, or that holds no run.

    Returns:
        The directory, absolute, so that a later change of the working directory does not move the run.

    Raises:
        FileExistsError: `path` holds a run, or is a file. Nothing was changed.
    """
    check_new(path)
    run = Path(path).absolute()
    run.mkdir(parents=True, exist_ok=True)
    try:
        # "x" decides between two programs that pass the check at the same time.
        with open(run / CONFIG, "xb") as file:
            file.write(_dump(_environment()))
    except FileExistsError:
        raise _holds_a_run(path) from None
    return run


def check_new(path: str | os.PathLike[str]) -> None:
    """Raise the FileExistsError of `create` where a run cannot be made at `path`, and make nothing."""
    run = Path(path)
    if run.exists() and not run.is_dir():
        raise FileExistsError(f"the run directory {str(path)!r} is a file. Pick another name.")
    if (run / CONFIG).exists() or any(run.glob(METRICS)):
        raise _holds_a_run(path)


def metrics_file(run: str | os.PathLike[str]) -> Path:
    """The file that the run's records are appended to."""
    return Path(run) / METRICS.replace("*", "00000")


def write_schema(run: str | os.PathLike[str], metrics: Iterable[Metric]) -> None:
    """Add the schema, a list of `{name, unit, scope, merge}` in the vector's order, to the run's `config.json`."""
    config = Path(run) / CONFIG
    content = orjson.loads(config.read_bytes())
    content["schema"] = [asdict(metric) for metric in metrics]
    # A reader sees the old file or the new one, never half of one.
    temporary = config.with_suffix(".json.tmp")
    temporary.write_bytes(_dump(content))
    os.replace(temporary, config)


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None where pip knows none, as in a source checkout."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _environment() -> dict[str, Any]:
    # MindSpore's builds for a device have distribution names of their own, so the loaded module is asked.
    mindspore = getattr(sys.modules.get("mindspore"), "__version__", None) or version_of("mindspore")
    versions = {"python": platform.python_version(), "mindspore": mindspore}
    versions.update((name, version_of(name)) for name in ("mindspore-instrument", "numpy"))
    return {"command": [sys.executable, *sys.argv],
            "versions": {name: version for name, version in versions.items() if version is not None}}


def _dump(content: dict[str, Any]) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _holds_a_run(path: str | os.PathLike[str]) -> FileExistsError:
    return FileExistsError(f"the run directory {str(path)!r} already holds a run, and a run is never overwritten. "
                           "Pick another name, or move the old run away.")
