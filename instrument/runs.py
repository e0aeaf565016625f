"""The run directory: where the files of one training run lie, and what tells a run from another directory.

    RUN/config.json               what runs: hyper-parameters, versions, device, command line, commit, schema, resumes
    RUN/metrics-00000.jsonl       one line a record (`instrument.writers.JsonlWriter`), in files that follow each other
    RUN/histograms-00000.jsonl    likewise, one line a record that has histograms
    RUN/alarms.jsonl              one line for each beginning and each end of an alarm
    RUN/samples.jsonl             one line a text
    RUN/events.out.tfevents.*     for TensorBoard (`instrument.writers.TensorBoardWriter`)
    RUN/summary.json              how it ended: status, last step, errors, what was left out
    RUN/rank_1/ ...               the same of the other ranks of a parallel job
    RUN/run.lock                  who writes here, while somebody does (`instrument.locks`)

Owns names, `config.json`, and who may write in a directory. Writing records is the writers' work, reading them back that of
`reading.py`. Does not import MindSpore, so tools that read runs start fast and work where it is not installed.
"""
from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import psutil

from instrument import environment, lines, locks
from instrument.environment import version_of
from instrument.locks import RunInUse
from instrument.record import RunInfo
from instrument.schema import Metric

__all__ = ["ALARMS", "CONFIG", "HISTOGRAMS", "METRICS", "RANK", "SAMPLES", "SUMMARY", "Run", "RunInUse", "check_new",
           "create", "follow", "holds_a_run", "metrics_file", "read_config", "version_of", "write_schema"]

CONFIG = "config.json"
METRICS = "metrics-*.jsonl"
HISTOGRAMS = "histograms-*.jsonl"
ALARMS = "alarms.jsonl"
SAMPLES = "samples.jsonl"
SUMMARY = "summary.json"
RANK = "rank_*"
_LINE_FILES = METRICS, HISTOGRAMS, ALARMS, SAMPLES

# How far the ranks of one job may be apart when they start, clocks of hosts included, in seconds.
_TOGETHER = 300.0


class Run(os.PathLike):  # type: ignore[type-arg]
    """A directory that this process may write in, until `close`. Made by `create` and `follow`; usable as a path.

    Attributes:
        path: The directory, absolute, so that a later change of the working directory does not move the run.
        requested: The directory that was asked for; another one where that held a run.
        config: What `config.json` holds.
        resumed: The run goes on where an earlier process left it.
    """

    def __init__(self, path: Path, *, requested: Path, config: dict[str, Any], resumed: bool, lock: locks.Lock):
        self.path, self.requested, self.config, self.resumed = path, requested, config, resumed
        self._lock = lock

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, resumed={self.resumed})"

    @property
    def renamed(self) -> bool:
        """Whether the name asked for was taken, so that this is the next free one."""
        return self.path != self.requested

    def info(self, *, total_steps: int | None = None) -> RunInfo:
        """What writers are told of this run."""
        return RunInfo(self.path.name, self.path, self.config, self.resumed, total_steps)

    def reopen(self) -> None:
        """Hold the directory again, after `close`.

        Raises:
            RunInUse: Another process has resumed the run in the meantime.
        """
        if not self._lock.is_held:
            self._lock = locks.acquire(self.path)

    def close(self) -> None:
        """Let another process resume the run. Closing twice is no error."""
        self._lock.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *err: Any) -> None:
        self.close()


def create(path: str | os.PathLike[str], *, resume: bool = False, config: Mapping[str, Any] | None = None, rank: int = 0,
           ranks: int = 1, stage: int | None = None, stages: int | None = None, job: str | None = None) -> Run:
    """Take a directory for a run: a new one, or that of a run which goes on.

    A run is never overwritten: where `path` holds one, the next free name is taken, `path-2`, `path-3` and so on. Of two
    processes that start at once, each gets a directory of its own.

    Args:
        path: The directory; made where it does not exist, with its parents.
        resume: Go on in `path`, if it holds a run: its torn last lines are repaired, and `config.json` gets one entry more in
            `resumes`. What else it holds stays, except for `ranks`, `stage` and `stages`; what of `config` is not as it was
            is in the entry's `changed`.
        config: More for `config.json`, such as `hyper_parameters` and `device`. What JSON does not have is written as text.
        rank: This process in a parallel job. Others than 0 use `follow`, unless they are to have a run of their own.
        ranks: How many processes the job has.
        stage: This process's pipeline stage.
        stages: How many there are.
        job: A text that the processes of one job have in common, by which they find this run (`follow`).

    Returns:
        The run. Its `renamed` says whether another name was taken.

    Raises:
        FileExistsError: `path` is a file.
        RunInUse: The run to resume is in use by a living process. It is a FileExistsError, too.
        OSError: The directory cannot be made or written, as on a read-only disk.
    """
    requested = Path(path).absolute()
    ours = {"rank": rank, "ranks": ranks, "stage": stage, "stages": stages, "job": job}
    with _explained(requested):
        if resume:
            return _take(requested, requested, config, ours, resume=True)
        for candidate in _names(requested):
            if candidate == requested or not candidate.exists() or candidate.is_dir():
                # Of two that see the same free name, one has the lock, and then the config.
                with contextlib.suppress(RunInUse, _Taken):
                    return _take(candidate, requested, config, ours, resume=False)
    raise AssertionError("there is no end of names")


def follow(path: str | os.PathLike[str], *, rank: int, job: str, config: Mapping[str, Any] | None = None, ranks: int = 1,
           stage: int | None = None, stages: int | None = None, timeout: float = 60.0) -> Run:
    """The directory of a rank other than 0: `rank_<n>` in the run that rank 0 of the same job has taken.

    Waits until there is a run of that job at `path`, `path-2` and so on which its process still holds, and which began, or was
    resumed, at about the time at which this process started: a cluster may give each of its jobs the same name.

    Args:
        path: What rank 0 was given.
        rank: This process, from 1.
        job: What rank 0 was given.
        config: As for `create`; likewise `ranks`, `stage` and `stages`.
        timeout: Seconds to wait at most.

    Raises:
        TimeoutError: Rank 0 has taken no directory in that time.
        RunInUse: Another process has this rank's directory.
        OSError: As for `create`.
    """
    requested = Path(path).absolute()
    started = psutil.Process().create_time()
    deadline = time.monotonic() + timeout
    pause = 0.05
    while True:
        found = [(time_of, run) for run, time_of in _runs_of(requested, job)
                 if time_of >= started - _TOGETHER and locks.holder(run) is not None]
        if found:
            directory = max(found)[1] / RANK.replace("*", str(rank))
            ours = {"rank": rank, "ranks": ranks, "stage": stage, "stages": stages, "job": job}
            with _explained(directory):
                return _take(directory, directory, config, ours, resume=True)
        if time.monotonic() >= deadline:
            raise TimeoutError(f"rank {rank} waited {timeout:g} s for rank 0 of job {job!r} to take the run directory "
                               f"{str(requested)!r}, and it did not. Give all ranks the same directory, on a disk that they "
                               "share, and see whether rank 0 still runs.")
        time.sleep(min(pause, max(deadline - time.monotonic(), 0)))
        pause = min(2 * pause, 2.0)  # thousands of ranks may wait on one file system


def check_new(path: str | os.PathLike[str]) -> None:
    """Raise FileExistsError where `path` holds a run or is a file, and make nothing."""
    run = Path(path)
    if run.exists() and not run.is_dir():
        raise FileExistsError(f"the run directory {str(path)!r} is a file. Pick another name.")
    if holds_a_run(run):
        raise FileExistsError(f"the run directory {str(path)!r} already holds a run, and a run is never overwritten. "
                              "Pick another name, or move the old run away.")


def holds_a_run(path: Path) -> bool:
    """Whether a directory is that of a run."""
    return (path / CONFIG).exists() or any(lines.numbered(path, pattern) for pattern in _LINE_FILES)


def began(run: Path) -> float:
    """When `config.json` was written, by which the newest run is told: by the last record, two that train at once would take
    turns."""
    for path in (run / CONFIG, run):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def last_step(run: str | os.PathLike[str]) -> int:
    """The step of the last line of metrics; 0 where there is none."""
    for file in reversed(lines.numbered(Path(run), METRICS)):
        with open(file, "rb") as opened:
            opened.seek(max(os.path.getsize(file) - 2 ** 20, 0))
            for line in reversed(opened.read().splitlines()):
                with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError, ValueError):
                    return int(orjson.loads(line)["step"])
    return 0


def metrics_file(run: str | os.PathLike[str]) -> Path:
    """The first of the files that the run's records are appended to."""
    return Path(run) / METRICS.replace("*", "00000")


def read_config(run: str | os.PathLike[str]) -> dict[str, Any]:
    """What `config.json` holds; empty where there is none, or none that can be read."""
    return _object(Path(run) / CONFIG)


def read_summary(run: str | os.PathLike[str]) -> dict[str, Any]:
    """What `summary.json` holds, likewise; a run that has not ended has none."""
    return _object(Path(run) / SUMMARY)


def _object(file: Path) -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError, orjson.JSONDecodeError):
        content = orjson.loads(file.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


def write_schema(run: str | os.PathLike[str], metrics: Iterable[Metric], histograms: Iterable[str] = (), *,
                 max_grad_norm: float | None = None) -> None:
    """Add the schema to the run's `config.json`.

    Args:
        run: The run, or its directory.
        metrics: Stored as `schema`, a list of `{name, unit, scope, merge}` in the vector's order.
        histograms: Names, stored as `histograms`.
        max_grad_norm: The norm that the step clips its gradients to, stored likewise; None where it does not.
    """
    content = run.config if isinstance(run, Run) else read_config(run)
    content["schema"] = [{"name": each.name, "unit": each.unit, "scope": each.scope, "merge": each.merge} for each in metrics]
    content["histograms"] = list(histograms)
    content.pop("max_grad_norm", None)  # of the step before a resume
    if max_grad_norm is not None:
        content["max_grad_norm"] = float(max_grad_norm)
    lines.replace(Path(run) / CONFIG, content)


def write_total_steps(run: Run, total_steps: int) -> None:
    """Note in `config.json` how many steps the run will have in all, for who shows how far it is."""
    run.config["total_steps"] = int(total_steps)
    lines.replace(run.path / CONFIG, run.config)


def write_summary(run: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Store how a run ended as its `summary.json`; one that goes on and ends again gets a new one."""
    lines.replace(Path(run) / SUMMARY, dict(summary))


class _Taken(Exception):
    """The directory got a run in the moment in which we looked at it."""


def _take(directory: Path, requested: Path, config: Mapping[str, Any] | None, ours: dict[str, Any], *, resume: bool) -> Run:
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"the run directory {str(directory)!r} is a file. Pick another name.")
    if not resume and holds_a_run(directory):
        raise _Taken
    directory.mkdir(parents=True, exist_ok=True)
    lock = locks.acquire(directory)
    try:
        ours = {name: value for name, value in ours.items() if value is not None}
        given = lines.plain(config or {})
        process = lines.plain(environment.process())
        resumed = resume and holds_a_run(directory)
        content = read_config(directory) if resumed else {}
        if content:
            changed = {name: value for name, value in given.items() if content.get(name) != value}
            entry = {**process, **({"changed": changed} if changed else {}), **_only(ours, "job")}
            content["resumes"] = [*content.get("resumes", ()), entry]
            content.update(_only(ours, "ranks", "stage", "stages"))
        else:
            # A dozen ranks that ask for the state of one repository at once would wait on each other.
            commit = environment.git() if ours["rank"] == 0 else None
            content = {**given, "start_time": process.pop("time"), **process, **ours, "versions": environment.versions(),
                       **({} if commit is None else {"git": commit}), "resumes": []}
        if resumed:
            for pattern in _LINE_FILES:
                for file in lines.numbered(directory, pattern):
                    lines.repair(file)
            with contextlib.suppress(FileNotFoundError):
                if not read_config(directory):  # somebody's edit, perhaps: not ours to throw away
                    os.replace(directory / CONFIG, directory / f"{CONFIG}.unreadable")
            lines.replace(directory / CONFIG, content)
        else:
            _write_new(directory / CONFIG, content)
        return Run(directory, requested=requested, config=content, resumed=resumed, lock=lock)
    except BaseException:
        lock.close()
        raise


def _names(requested: Path) -> Iterator[Path]:
    yield requested
    for number in itertools.count(2):
        yield requested.with_name(f"{requested.name}-{number}")


def _runs_of(requested: Path, job: str) -> Iterator[tuple[Path, float]]:
    """Runs on that name, with the time at which they began, or were resumed last, by a job of that name."""
    for candidate in _names(requested):
        if not candidate.exists():
            if candidate != requested:
                return
            continue
        config = read_config(candidate)
        last = config["resumes"][-1] if config.get("resumes") else {**config, "time": config.get("start_time")}
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if last["job"] == job:
                yield candidate, datetime.fromisoformat(last["time"]).timestamp()


@contextlib.contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, TimeoutError):
        raise
    except OSError as error:
        raise OSError(error.errno, f"the run directory {str(directory)!r} cannot be written: {error.strerror}. Give one on a "
                      "disk that has space and that this user may write to.") from error


def _only(content: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: content[name] for name in names if name in content}


def _write_new(path: Path, content: dict[str, Any]) -> None:
    try:
        with open(path, "xb") as file:
            try:
                file.write(lines.dump(content, option=lines.INDENTED))
                file.flush()
            except OSError:
                path.unlink()  # no run began here
                raise
    except FileExistsError:
        raise _Taken from None
