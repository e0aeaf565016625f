"""`Follower`: reads the runs that somebody looks at, in threads of its own.

Owns when files are polled and new runs are looked for, and how much memory runs that nobody looks at may keep.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from instrument import runs
from instrument.dashboard.discovery import Directories
from instrument.dashboard.run import Run

POLL = 0.2  # seconds between two looks at the files of a run
DISCOVER = 3.0  # and at the directories, for new runs
# Runs that nobody looks at are forgotten, the longest unseen first, while all take more bytes than this.
_MEMORY = 1200 << 20


class Follower:
    """Follows the runs that somebody asks for.

    Args:
        directories: Where runs are looked for.
        changed: Called from a thread of this class after a run has something new.
    """

    def __init__(self, directories: Directories, changed: Callable[[], None] = lambda: None):
        self.directories, self.changed = directories, changed
        self.found: dict[str, Path] = directories.find()
        self._looked = time.monotonic()
        self._newest: tuple[dict[str, Path], str] = {}, ""
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for loop in (self._loop, self._discover):
            thread = threading.Thread(target=loop, name=f"instrument-{loop.__name__.strip('_')}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Stop reading; returns when the threads have ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join(5)

    def run(self, name: str) -> Run | None:
        """A run by its name, followed from now on; None where no such run was found."""
        with self._lock:
            run, directory = self._runs.get(name), self.found.get(name)
            if run is None or directory not in (None, run.directory):  # the name is another directory's now
                if directory is None:
                    return None
                run = self._runs[name] = Run(name, directory)
                thread = threading.Thread(target=self._read_history, args=(run,), name="instrument-history", daemon=True)
                self._threads = [each for each in self._threads if each.is_alive()] + [thread]
                thread.start()
            run.wanted = time.monotonic()
            return run

    def look_again(self) -> None:
        """Look for new runs now, as when somebody asks for one that was not there a moment ago."""
        with self._lock:
            if time.monotonic() - self._looked < DISCOVER / 4:
                return
            self._looked = time.monotonic()
        self.found = self.directories.find()

    def newest(self) -> str:
        """The run that began, or was resumed, last, of ranks of one job the first; empty without any."""
        found = self.found
        if self._newest[0] is not found:
            first = [name for name in found if "/rank_" not in f"/{name}"] or list(found)
            self._newest = found, max(first, key=lambda name: runs.began(found[name]), default="")
        return self._newest[1]

    def known(self, name: str) -> Run | None:
        """A run that is followed already; None for others."""
        with self._lock:
            return self._runs.get(name)

    def _read_history(self, run: Run) -> None:
        try:
            run.read_history(self.changed)
        except Exception as error:  # shown on the page: a run that cannot be read must not stop the others
            run.error, run.progress = f"{type(error).__name__}: {error}", None
            self.changed()

    def _discover(self) -> None:
        # In a thread of its own: a look at the directories of a thousand ranks on a slow disk takes seconds. Then looks are
        # rarer, too.
        pause = 0.0
        while not self._stop.wait(pause):
            start = time.monotonic()
            found = self.directories.find()
            new = found != self.found
            self.found = found  # also where it is the same: a run may have been resumed
            if new:
                self.changed()
            self._forget()
            pause = max(DISCOVER, 10 * (time.monotonic() - start))

    def _loop(self) -> None:
        while not self._stop.wait(POLL):
            with self._lock:
                followed = [run for run in self._runs.values() if run.progress is None]
            new = False
            for run in followed:
                try:
                    new |= run.poll()
                except Exception as error:
                    run.error = f"{type(error).__name__}: {error}"
            if new:
                self.changed()

    def _forget(self) -> None:
        with self._lock:
            now = time.monotonic()
            unseen = sorted((run for run in self._runs.values() if now - run.wanted > 60), key=lambda run: run.wanted)
            memory = sum(run.store.memory() for run in self._runs.values())
            for run in unseen:
                if memory <= _MEMORY:
                    break
                memory -= run.store.memory()
                del self._runs[run.name]
