"""`Run`: one run that is followed: its files, what they say, and what state it is in.

Owns the first reading of a long history, by several processes. When it is polled is the part of `follow.py`.
"""
from __future__ import annotations

import functools
import math
import multiprocessing
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import psutil

from instrument import parsing, reading, runs
from instrument.dashboard.store import Store
from instrument.dashboard.tail import SeriesTail, open_regular, read_small

# A longer history is parsed by processes of their own, in pieces of so many bytes.
_LONG, _PIECE = 48 << 20, 12 << 20
# Without a line for so many seconds, and for so many times the usual pause between lines, a run has stalled.
_STALLED, _PAUSES = 60.0, 20.0


class Run:
    """One run that is followed.

    Attributes:
        name: As `Directories.find` has it.
        directory: Where it is.
        store: What its files say.
        config: What `config.json` holds.
        summary: What `summary.json` holds; None before the end.
        progress: How much of the history has been read, 0 to 1; None when all of it has.
        error: What keeps files from being read; empty where nothing does.
        wanted: When somebody asked for it last, by the monotonic clock.
    """

    def __init__(self, name: str, directory: Path):
        self.name, self.directory = name, directory
        self.store = Store()
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] | None = None
        self.progress: float | None = 0.0
        self.error = ""
        self.wanted = time.monotonic()
        self._ended_at = 0.0
        self._ahead = 0.0  # seconds by which this clock is ahead of the run's, as far as records that came tell
        self._marks: dict[str, tuple[float, int]] = {}
        self._begin()

    def _begin(self) -> None:
        """All files count from their beginning."""
        self._metrics = SeriesTail(self.directory, runs.METRICS)
        self._elsewhere = False
        self._losses: SeriesTail | None = None  # of the last stage of a pipeline
        self._others = ((SeriesTail(self.directory, runs.HISTOGRAMS), self.store.add_histograms),
                        (SeriesTail(self.directory, runs.ALARMS), self.store.add_alarms),
                        (SeriesTail(self.directory, runs.SAMPLES), self.store.add_texts))

    def read_history(self, changed: Callable[[], None]) -> None:
        """Read what is there, and set `progress` meanwhile; `changed` is called each time."""
        self._read_documents()
        files = self._metrics.files()
        sizes = [(path, _whole_lines(path)) for path in files]
        total = sum(size for _, size in sizes)
        if total > _LONG:
            done = 0
            try:
                with _processes() as pool:
                    for part, size in _parts(sizes, pool):
                        self.store.add_part(part, wanted=self._is_ours)
                        done += size
                        self.progress = min(done / total, 0.99)
                        changed()
                self._metrics.begin_at(*sizes[-1])
            except (BrokenProcessPool, OSError):  # no more processes, say: read it here
                self.store.restart()
        while self.poll():
            done, total = self._metrics.progress()
            self.progress = min(done / max(total, 1), 0.99)
            changed()
        self.progress = None
        changed()

    def poll(self) -> bool:
        """Read what came; whether there was anything."""
        version = self.store.version
        before = version, self.error, self.summary
        self.error = ""
        if os.path.realpath(self.directory) != str(self.directory):
            self.error = f"{self.directory} is a link now, and links are not followed"
        else:
            self._read_documents()
            for tail, add in self._tails():
                try:
                    lines = tail.poll()
                except OSError as error:
                    self.error = str(error)
                    continue
                if lines.restarted:  # another run is in the directory, or somebody has edited what it says
                    self.store.restart()
                    self._begin()
                    return True
                if lines.content:
                    add(lines.content)
        if self.progress is None and self.store.version != version and math.isfinite(self.store.last_time):
            self._ahead = time.time() - self.store.last_time
        return (self.store.version, self.error, self.summary) != before

    def _tails(self) -> list[tuple[SeriesTail, Callable[[bytes], None]]]:
        tails: list[tuple[SeriesTail, Callable[[bytes], None]]] = [
            (self._metrics, functools.partial(self.store.add_metrics, wanted=self._is_ours)), *self._others]
        if self._elsewhere and self._losses is None:
            directory = reading.last_stage(self.directory, self.config)
            if directory is not None and not directory.is_symlink():
                self._losses = SeriesTail(directory, runs.METRICS)
        if self._losses is not None:
            tails.append((self._losses, functools.partial(self.store.add_metrics, wanted=reading.is_of_the_loss, source=1)))
        return tails

    def _is_ours(self, name: str) -> bool:
        return not self._elsewhere or not reading.is_of_the_loss(name)

    def _read_documents(self) -> None:
        config = self._document(runs.CONFIG)
        if config is not None:
            self.config = config
        self._elsewhere = reading.has_its_loss_elsewhere(self.config)
        summary = self._document(runs.SUMMARY)
        if summary is not None:
            self.summary = summary or None
            self._ended_at = self._marks[runs.SUMMARY][0]

    def _document(self, name: str) -> dict[str, Any] | None:
        """What a file of one JSON object holds, `{}` for nothing; None where it has not changed."""
        try:
            status = os.stat(self.directory / name)
            mark = status.st_mtime, status.st_size
        except OSError:
            mark = 0.0, 0
        if self._marks.get(name, (0.0, 0)) == mark:
            return None
        self._marks[name] = mark
        try:
            content = orjson.loads(read_small(self.directory / name) or b"{}")
        except orjson.JSONDecodeError:
            return None
        return content if isinstance(content, dict) else {}

    def state(self, now: float | None = None) -> tuple[str, str]:
        """`running`, `ended`, `failed`, `stalled` or `waiting`, and a text for people."""
        now = time.time() if now is None else now
        age = now - self._ahead - self.store.last_time
        if age < 0:  # the run's clock is ahead
            self._ahead, age = self._ahead + age, 0.0
        # A run that goes on after its end has the old summary until it ends again.
        if self.summary is not None and not self.store.last_time > self._ended_at + 5:
            status = str(self.summary.get("status") or "finished")
            return ("ended" if status == "finished" else "failed"), status
        if _is_gone(self.config) and age > 2:
            return "failed", f"its process is gone, without a word, since {_clock(self.store.last_time)}"
        if age != age:
            return "waiting", "waiting for the first record"
        if age > max(_STALLED, _PAUSES * (self.store.pace(50) or 0)):
            return "stalled", f"stalled since {_clock(self.store.last_time)}"
        return "running", "running"

    def start(self) -> float:
        """When the run began, in seconds since 1970 by the clock of the newest record: where the axis of time has its zero.

        As `config.json` says, since the files with the first records may have been deleted. NaN where nothing tells.
        """
        first = self.store.first_time
        try:
            began = datetime.fromisoformat(str(self.config.get("start_time"))).timestamp() - self.store.put_back
        except (ValueError, OverflowError, OSError):
            return first
        return first if first < began else began

    def total_steps(self) -> int | None:
        """How many steps the run will have, as far as its configuration says."""
        parameters = self.config.get("hyper_parameters")
        for place in (self.config, parameters if isinstance(parameters, dict) else {}):
            for name in ("total_steps", "max_steps", "train_steps", "steps"):
                value = place.get(name)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None


def _processes() -> ProcessPoolExecutor:
    # Spawned: this process has threads, of which a forked one would have none, and their locks.
    return ProcessPoolExecutor(max(min(os.cpu_count() or 2, 4), 2), multiprocessing.get_context("spawn"),
                               initializer=_end_with, initargs=(os.getpid(),))


def _end_with(parent: int) -> None:
    """In a helper process: end when the server is gone, however that ended; nobody else would tell."""
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _parts(sizes: list[tuple[Path, int]], pool: ProcessPoolExecutor) -> Any:
    """What is in files, in order, with the bytes of each piece; a few pieces ahead of who asks."""
    pieces = [(str(path), start, min(start + _PIECE, size)) for path, size in sizes for start in range(0, size, _PIECE)]
    ahead: deque[tuple[Future[parsing.Part], int]] = deque()
    for piece in pieces:
        ahead.append((pool.submit(parsing.parse, [piece]), piece[2] - piece[1]))
        if len(ahead) > 5:
            future, size = ahead.popleft()
            yield future.result(), size
    for future, size in ahead:
        yield future.result(), size


def _whole_lines(path: Path) -> int:
    """Bytes of a file up to its last newline."""
    file = open_regular(path)
    if file is None:
        return 0
    with file:
        end = os.fstat(file.fileno()).st_size
        while end > 0:
            start = max(end - 65536, 0)
            file.seek(start)
            at = (file.read(end - start) or b"").rfind(b"\n")
            if at >= 0:
                return start + at + 1
            end = start
    return 0


def _is_gone(config: dict[str, Any]) -> bool:
    """Whether the run's process was on this host and is no more. What cannot be told is not gone."""
    resumes = config.get("resumes")
    latest = resumes[-1] if isinstance(resumes, list) and resumes and isinstance(resumes[-1], dict) else config
    pid = latest.get("pid")
    if latest.get("host") != socket.gethostname() or type(pid) is not int:
        return False
    try:
        return not psutil.pid_exists(pid)
    except (OverflowError, psutil.Error):  # no number of a process
        return False


def _clock(seconds: float) -> str:
    try:
        then = time.localtime(seconds)
    except (ValueError, OverflowError, OSError):  # NaN, or no time at all
        return "its start"
    return time.strftime("%H:%M:%S" if time.time() - seconds < 72_000 else "%Y-%m-%d %H:%M", then)
