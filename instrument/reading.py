"""`read`: a run directory as NumPy arrays.

Owns what of the files counts, and which rank's number is the run's. Metrics are parsed by `parsing.py` and made columns by
`columns.py`. Does not import MindSpore.
"""
from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from instrument import lines, parsing, runs
from instrument.bins import BINS
from instrument.columns import Columns
from instrument.record import VALIDATION
from instrument.spread import Spread, spread


class Series(NamedTuple):
    """What one metric was, step by step. The arrays are read-only: metrics share their steps.

    Attributes:
        step: int64 [n], ascending.
        value: float64 [n].
    """

    step: np.ndarray
    value: np.ndarray


class Histograms(NamedTuple):
    """What one histogram was.

    Attributes:
        step: int64 [n], ascending.
        counts: int64 [n, `bins.BINS`], as `instrument.bins` lays them out.
    """

    step: np.ndarray
    counts: np.ndarray


def read(path: str | os.PathLike[str], *, processes: int | None = None) -> RunData:
    """Read a run back, also while it is being written.

    Args:
        path: The run directory.
        processes: How many processes parse metrics, this one included, where there are enough of them; all cores up to four
            by default.

    Returns:
        `{metric: Series(step, value)}`, and more in attributes.

    Raises:
        FileNotFoundError: There is no run; the message names the newest one in the directory, or some that are near.

    Examples:
        >>> run = instrument.read("runs/first")
        >>> step, loss = run["loss"]
        >>> step
        array([1, 2, 3])
    """
    directory = Path(path).absolute()
    if not runs.holds_a_run(directory):
        raise FileNotFoundError(no_run(path, directory))
    return RunData(directory, processes=processes or min(_cores(), 4))


class RunData(Mapping[str, Series]):
    """The metrics of a run, `{name: Series(step, value)}`. Made by `read`.

    NaN and infinities are what they were. The files of a rotated run are one. Where a run was resumed, the steps that were
    made again are those of the later process; of several values of a metric at one step the last written counts. Lines that
    are no record, such as a torn one, are left out and counted.

    In a pipeline, `loss` and what is made of it are those of the last stage, in whichever rank's directory they are.

    Attributes:
        path: The run directory.
        config: What `config.json` holds; empty where it is missing.
        alarms: Beginnings and ends of alarms, as `Incident` has them, with the record's `step` and `time`.
        texts: `[{"step", "time", "name", "text"}]`.
    """

    def __init__(self, path: Path, *, processes: int = 1):
        self.path, self.config = path, runs.read_config(path)
        self._processes = processes
        self._columns = Columns(parsing.parse_all(lines.numbered(path, runs.METRICS), processes=processes))
        self._skipped = self._columns.skipped
        self.alarms = [_restored(line) for line in self._documents(runs.ALARMS, "alarm")]
        self.texts = list(self._documents(runs.SAMPLES, "text"))
        self._histograms: dict[str, Histograms] | None = None
        self.ranks: Mapping[int, RunData] = _Ranks(path, processes)
        self._elsewhere = has_its_loss_elsewhere(self.config)
        self._last: RunData | None = None

    @property
    def skipped(self) -> int:
        """How many lines were no record; those of histograms are counted when histograms are asked for first."""
        return self._skipped

    @property
    def times(self) -> Series:
        """When each step was recorded, in seconds since 1970."""
        return Series(*self._columns.times())

    @property
    def histograms(self) -> Mapping[str, Histograms]:
        """`{name: Histograms(step, counts)}`, read when it is asked for first."""
        if self._histograms is None:
            self._histograms = _histograms(self._documents(runs.HISTOGRAMS, "histograms"))
        return self._histograms

    def spread(self, name: str) -> Spread:
        """How far the ranks are apart in a metric that each records for itself, such as `step_time` and `data_wait`.

        Args:
            name: The metric.

        Returns:
            Step by step the smallest and the largest value, and which rank has the largest; see `Spread`. This run's own
            directory is rank 0. Ranks are read one after the other, and not kept.

        Raises:
            KeyError: No rank has recorded the metric.

        Examples:
            >>> slow = instrument.read("runs/first").spread("step_time")
            >>> np.bincount(slow.rank)                    # how often each rank was the slowest: there is but one
            array([3])
        """
        own = self.config.get("rank", 0)
        parts = itertools.chain([(own, self._columns)], ((rank, self._of_rank(rank)) for rank in self.ranks))
        found = spread((rank, *columns[name]) for rank, columns in parts if name in columns.names)
        if not len(found.step):
            raise KeyError(f"no rank of the run {str(self.path)!r} has recorded {name!r}. list(run) gives what rank 0 has, "
                           "list(run.ranks[1]) what rank 1 has.")
        return found

    def __getitem__(self, name: str) -> Series:
        if self._elsewhere and is_of_the_loss(name):
            last = self._last_stage()
            if last is not None:
                return last[name]
        elif name in self._columns.names:
            return Series(*self._columns[name])
        near = difflib.get_close_matches(name, list(self), 3)
        raise KeyError(f"no metric {name!r} in the run {str(self.path)!r}; near names: {', '.join(near) or 'none'}. "
                       "list(run) gives all of them.")

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        return f"RunData({str(self.path)!r}, {len(self)} metrics)"

    def _of_rank(self, rank: int) -> Columns:
        path = self.path / runs.RANK.replace("*", str(rank))
        return Columns(parsing.parse_all(lines.numbered(path, runs.METRICS), processes=self._processes))

    def _names(self) -> Mapping[str, None]:
        if not self._elsewhere:
            return dict.fromkeys(self._columns.names)
        last = self._last_stage()
        return dict.fromkeys([*(name for name in self._columns.names if not is_of_the_loss(name)),
                              *(name for name in (last or ()) if is_of_the_loss(name))])

    def _last_stage(self) -> RunData | None:
        if self._last is None:
            path = last_stage(self.path, self.config)
            self._last = None if path is None else self.ranks[_rank(path)]
        return self._last

    def _documents(self, pattern: str, content: str) -> Iterable[dict[str, Any]]:
        """The lines of files with smaller numbers of lines, without those of steps that were made again."""
        kept: list[dict[str, Any]] = []
        for path in lines.numbered(self.path, pattern):
            with open(path, "rb") as file:
                for line in file:
                    try:
                        document = orjson.loads(line)
                        step = document["step"]
                        if type(step) is not int or not (content in document or document.get("resumed") is True):
                            raise TypeError
                    except (orjson.JSONDecodeError, KeyError, TypeError):
                        self._skipped += 1
                        continue
                    if content in document:
                        kept.append(document)
                    else:
                        kept = [each for each in kept if each["step"] <= step]
        return kept


class _Ranks(Mapping[int, RunData]):
    """`{rank: RunData}` of the directories `rank_<n>` of a run, each read when it is asked for first."""

    def __init__(self, run: Path, processes: int):
        self._run, self._processes = run, processes
        self._read: dict[int, RunData] = {}

    def __getitem__(self, rank: int) -> RunData:
        if rank not in self._read:
            path = self._run / runs.RANK.replace("*", str(rank))
            if not runs.holds_a_run(path):
                raise KeyError(f"no rank {rank!r} in the run {str(self._run)!r}; there are: {list(self)}.")
            self._read[rank] = RunData(path, processes=self._processes)
        return self._read[rank]

    def __contains__(self, rank: object) -> bool:
        return rank in list(self)

    def __iter__(self) -> Iterator[int]:
        return (_rank(path) for path in lines.numbered(self._run, runs.RANK) if runs.holds_a_run(path))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _histograms(documents: Iterable[dict[str, Any]]) -> dict[str, Histograms]:
    found: dict[str, dict[int, np.ndarray]] = {}
    for document in documents:
        for name, each in document["histograms"].items():
            counts = np.zeros(BINS, np.int64)
            counts[each["low"]:each["low"] + len(each["counts"])] = each["counts"]
            found.setdefault(name, {})[document["step"]] = counts
    return {name: Histograms(np.array(sorted(steps), np.int64), np.array([steps[step] for step in sorted(steps)]))
            for name, steps in found.items()}


def _restored(alarm: dict[str, Any]) -> dict[str, Any]:
    nonfinite = alarm.pop("nonfinite", None)
    return {**alarm, "value": float(nonfinite["value"])} if nonfinite else alarm


def has_its_loss_elsewhere(config: Mapping[str, Any]) -> bool:
    """Whether a run with that `config.json` is rank 0 of a pipeline with its first stage, whose loss means nothing."""
    stages = config.get("stages")
    return isinstance(stages, int) and stages > 1 and config.get("stage", 0) != stages - 1 and config.get("rank", 0) == 0


def last_stage(run: Path, config: Mapping[str, Any]) -> Path | None:
    """The directory of the lowest rank of a pipeline's last stage; None where there is none yet."""
    for path in lines.numbered(run, runs.RANK):
        other = runs.read_config(path) if runs.holds_a_run(path) else {}
        if other.get("stages") == config["stages"] and other.get("stage") == config["stages"] - 1:
            return path
    return None


def _rank(path: Path) -> int:
    return int(path.name[runs.RANK.index("*"):])


def is_of_the_loss(name: str) -> bool:
    """Whether a metric is the loss, or made of it."""
    name = name[len(VALIDATION):] if name.startswith(VALIDATION) else name
    return name in ("loss", "perplexity") or name.startswith("loss/")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def no_run(path: str | os.PathLike[str], directory: Path) -> str:
    """The sentence that says so, with the runs that are near."""
    def in_(parent: Path) -> list[str]:
        try:
            return sorted(str(each) for each in parent.iterdir() if runs.holds_a_run(each))
        except OSError:
            return []

    def listed(names: list[str]) -> str:
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

    said = f"no run in {os.fspath(path)!r}: it has neither {runs.CONFIG} nor {runs.METRICS}"
    there = in_(directory)
    if there:
        newest = max(there, key=lambda each: runs.began(Path(each)))
        others = [each for each in there if each != newest]
        return f"{said}, but runs are in it. The newest of them: {newest}{f'; others: {listed(others)}' if others else ''}."
    beside = {Path(each).name: each for each in in_(directory.parent)}
    near = [beside[name] for name in difflib.get_close_matches(directory.name, beside, 3, 0.3)] or list(beside.values())
    return f"{said}. Runs near it: {listed(near) or 'none'}."
