"""`Background`: one thread that brings what was recorded to the writers, so that training never waits for a writer.

Owns the queue, what happens when it is full, which writer is served next, and writers that raise or hang. Knows nothing of
MindSpore, and of a record only whether it has alarms.
"""
from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from instrument.record import Record, RunInfo
from instrument.writers.base import Writer

WhenFull = Literal["wait", "drop"]


class Kept:
    """An item that is never left out, however full the queue is."""


class _Job(NamedTuple):
    """A call that a writer has still to get."""

    call: Callable[[], None]
    may_be_left_out: bool = False  # a record without alarms


class _Lane:
    """What one writer has still to get, and how long it has taken so far."""

    def __init__(self, writer: Writer):
        self.writer = writer
        self.jobs: deque[_Job] = deque()
        self.seconds = 0.0
        self.given_up = False  # it hung
        self.shut = False  # it is too slow for the end of training: no more records until it is closed

    @property
    def name(self) -> str:
        return name_of(self.writer)


class Background:
    """Hands items to writers in a thread of its own; each writer gets them in the order in which they were put.

    There is one thread. Of the writers that have something to do, it serves the one that has taken the least time so far, so
    that a slow one delays no other by more than one call. Where a writer does not return within `timeout` seconds, it is
    given up together with the thread that is in it, which nothing can interrupt, and another thread goes on with the
    remaining writers.

    Args:
        writers: The destinations.
        prepare: Makes the records of an item, in the thread.
        capacity: How many items may wait, and how many records for each writer.
        when_full: `drop` leaves out the oldest that waits and counts it in `dropped`; `wait` makes `put` wait for a
            place, for `timeout` seconds at most a writer that hangs. What has alarms is never left out.
        timeout: Seconds after which a writer that does not return is given up.
        flush_seconds: The writers are flushed so often, while there is something to flush.
    """

    def __init__(self, writers: Sequence[Writer], prepare: Callable[[Any], Sequence[Record]], *, capacity: int = 4096,
                 when_full: WhenFull = "drop", timeout: float = 30.0, flush_seconds: float = 2.0):
        self.capacity, self.when_full, self.timeout, self.flush_seconds = capacity, when_full, timeout, flush_seconds
        self.errors: Counter[str] = Counter()
        # Records left out because a queue was full, or there was no time left: one that all writers miss counts once, one
        # that some miss once for each.
        self.dropped = 0
        self.written = 0  # records with numbers or texts that went to the writers
        self._prepare = prepare
        self._items: deque[Any] = deque()
        self._lanes = [_Lane(writer) for writer in writers]
        self._reports: deque[str] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._call: tuple[_Lane | None, float] | None = None  # whose call is being made, and since when; None is ours
        self._in_a_hurry = False
        self._closing = False  # the thread ends when nothing is left
        self._unflushed = False
        self._flushed = time.monotonic()
        self._process = os.getpid()

    def start(self, run: RunInfo) -> None:
        """Tell the writers of the run, before what is put after this."""
        self._add(run)

    def put(self, item: Any) -> None:
        """Queue one item. Does not raise, and waits only where `when_full` says so."""
        if self.when_full == "wait" and not isinstance(item, Kept):
            with self._changed:
                while not self._in_a_hurry and self._waiting() >= self.capacity:
                    if self._is_forked():
                        return
                    self._give_up_what_hangs()
                    self._changed.wait(0.05)
        self._add(item)

    def flush(self, timeout: float | None = None) -> bool:
        """Bring all that was put to the destinations; False where `timeout` seconds do not suffice."""
        self._add(_FLUSH)
        return self._drained(timeout)

    def close(self, timeout: float = 60.0, writer_timeout: float | None = None) -> None:
        """Bring all that was put to the destinations, and close the writers. The thread ends; a later `put` starts one again.

        Args:
            timeout: Seconds after which a writer that keeps the others waiting gets no more records; what it misses is
                counted.
            writer_timeout: Until this returns, a writer that does not return within so many seconds is given up.
        """
        usual = self.timeout
        if writer_timeout is not None:
            self.timeout = min(usual, writer_timeout)
        try:
            self._close(timeout)
        finally:
            self.timeout, self._in_a_hurry = usual, False

    def hurry(self) -> None:
        """Until the next `close`, `put` waits for no writer."""
        self._in_a_hurry = True

    def _close(self, timeout: float) -> None:
        drained = self._drained(timeout)
        for _ in self._lanes:
            if not drained:
                self._shut_the_slow(timeout)
                drained = self._drained(self.timeout + 0.1)  # what hangs has been given up by then
        self._add(_CLOSE)
        self._drained(self.timeout * (len(self._lanes) + 1))

    def has_reports(self) -> bool:
        """Whether there may be something in `reports`; without waiting for anybody."""
        call = self._call
        return bool(self._reports) or (call is not None and time.monotonic() - call[1] >= self.timeout)

    def reports(self) -> Iterator[str]:
        """What is to be reported to the user, each once."""
        with self._changed:
            self._give_up_what_hangs()
        while self._reports:
            yield self._reports.popleft()

    def report(self, source: str, error: BaseException) -> None:
        """Count an error; the first one of a source is reported."""
        self.errors[source] += 1
        if self.errors[source] == 1:
            self._reports.append(f"{source} failed: {_said(error)}. Training goes on; more failures of it are counted in the "
                                 "monitor's `errors`, and not reported.")

    @property
    def given_up(self) -> list[str]:
        """Names of the writers that hung."""
        return [lane.name for lane in self._lanes if lane.given_up]

    def _waiting(self) -> int:
        """How many records the writer that is the latest has still to get."""
        return len(self._items) + max((len(lane.jobs) for lane in self._lanes), default=0)

    def _is_forked(self) -> bool:
        """In a worker process that was forked from ours there is no thread, and nothing to record."""
        return os.getpid() != self._process

    def _add(self, item: Any) -> None:
        if self._is_forked():
            return
        with self._changed:
            if self.when_full == "drop" and len(self._items) >= self.capacity and _may_be_left_out(item):
                oldest = next((i for i, each in enumerate(self._items) if _may_be_left_out(each)), None)
                if oldest is not None:
                    del self._items[oldest]
                    self._drop("the writers do not")
            self._items.append(item)
            if self._thread is None:
                self._begin_thread()
            self._changed.notify_all()

    def _drop(self, who: str) -> None:
        self.dropped += 1
        if self.dropped == 1:
            self._reports.append(f"{who} keep up: the oldest of {self.capacity} waiting records was left out. More are "
                                 "counted in the monitor's `dropped`. Record fewer steps by `every`, or use "
                                 'when_full="wait".')

    def _begin_thread(self) -> None:
        self._thread = threading.Thread(target=self._work, name="instrument", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads: the next item tries again
            self._thread = None
            self.report(_OURS, error)

    def _drained(self, timeout: float | None) -> bool:
        """Wait until nothing is left to do; False where it takes longer than `timeout` seconds."""
        if self._is_forked():
            return True
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._items or self._call is not None or self._closing or any(lane.jobs for lane in self._lanes):
                if self._thread is None or not self._thread.is_alive():
                    self._begin_thread()
                self._give_up_what_hangs()
                left = 0.05 if end is None else min(0.05, end - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _give_up_what_hangs(self) -> None:
        """Called with the lock held."""
        if self._call is None or time.monotonic() - self._call[1] < self.timeout:
            return
        lane, _ = self._call
        self._call = None
        if lane is not None:
            lane.given_up = True
            lane.jobs.clear()
            what = "It gets no more records"
        else:
            what = "This record is left out"
        name = _OURS if lane is None else lane.name
        self.errors[name] += 1
        self._reports.append(f"{name} has not returned for {self.timeout:g} seconds. {what}; training goes on.")
        self._begin_thread()
        self._changed.notify_all()

    def _shut_the_slow(self, seconds: float) -> None:
        """Leave out what the writer has not got that keeps the others waiting."""
        with self._changed:
            lane = self._call[0] if self._call is not None else None
            if lane is None or lane.shut:
                lane = max((each for each in self._lanes if not each.shut), key=lambda each: each.seconds, default=None)
            if lane is None:
                return
            lane.shut = True
            left = sum(map(_may_be_left_out, self._items)) + sum(job.may_be_left_out for job in lane.jobs)
            lane.jobs = deque(job for job in lane.jobs if not job.may_be_left_out)
            if left:
                self.dropped += left
                self._reports.append(f"{lane.name} did not take everything within {seconds:g} seconds at the end: {left} "
                                     "records were left out of it.")

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                found = self._next() if self._thread is me else None
                if found is None:
                    return  # at the end, or given up while it hung
                lane, call = found
                started = time.monotonic()
                self._call = lane, started
            error: BaseException | None = None
            try:
                call()
            except BaseException as raised:  # SystemExit too: nothing of a writer ends the thread
                error = raised
            with self._changed:
                if self._thread is not me:
                    return
                self._call = None
                if lane is not None:
                    lane.seconds += time.monotonic() - started
                if error is not None:
                    self.report(_OURS if lane is None else lane.name, error)
                self._changed.notify_all()

    def _next(self) -> tuple[_Lane | None, Callable[[], None]] | None:
        """The next call to make, with the lock held; waits for one. None: the thread has to end."""
        while True:
            while self._items and not self._all_are_behind():
                item = self._items.popleft()
                if not isinstance(item, (_Command, RunInfo)):
                    self._changed.notify_all()
                    return None, partial(self._expand, item)
                self._closing = item is _CLOSE
                for lane in self._lanes:
                    if not lane.given_up:
                        lane.jobs.append(_Job(_call_for(item, lane.writer)))
            if self._unflushed and time.monotonic() - self._flushed >= self.flush_seconds:
                self._flushed, self._unflushed = time.monotonic(), False
                self._items.append(_FLUSH)
                continue
            busy = [lane for lane in self._lanes if lane.jobs]
            if busy:
                lane = min(busy, key=lambda each: each.seconds)
                return lane, lane.jobs.popleft().call
            if self._closing:
                self._closing, self._thread = False, None
                for lane in self._lanes:
                    lane.shut = False
                self._changed.notify_all()
                return None
            self._changed.wait(self._flushed + self.flush_seconds - time.monotonic() if self._unflushed else None)
            if self._thread is not threading.current_thread():
                return None

    def _all_are_behind(self) -> bool:
        """Whether each writer has something to do. More records would only wait, and push out those that wait already."""
        lanes = [lane for lane in self._lanes if not lane.given_up]
        return bool(lanes) and all(lane.jobs for lane in lanes)

    def _expand(self, item: Any) -> None:
        """Make the records of an item, and the calls that write them."""
        records = self._prepare(item)
        with self._changed:
            if self._thread is not threading.current_thread():
                return
            for record in records:
                self.written += bool(record.values or record.texts)  # one of the end has alarms alone
                self._unflushed = True
                for lane in self._lanes:
                    if not lane.given_up and not (lane.shut and not record.alarms):
                        self._give(lane, record)

    def _give(self, lane: _Lane, record: Record) -> None:
        if self.when_full == "drop" and len(lane.jobs) >= self.capacity and not record.alarms:
            oldest = next((i for i, job in enumerate(lane.jobs) if job.may_be_left_out), None)
            if oldest is not None:
                del lane.jobs[oldest]
                self._drop(f"{lane.name} does not")
        lane.jobs.append(_Job(partial(lane.writer.write, record), may_be_left_out=not record.alarms))


class _Command(Kept):
    """What the thread is asked to do besides taking records."""


_FLUSH, _CLOSE = _Command(), _Command()
_OURS = "TrainingMonitor"  # what messages call an error that is no writer's


def _call_for(item: _Command | RunInfo, writer: Writer) -> Callable[[], None]:
    if isinstance(item, RunInfo):
        return partial(writer.start, item)
    return writer.close if item is _CLOSE else writer.flush


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {str(error).rstrip('.')}"
    except Exception:  # its text is code of somebody else's
        return type(error).__name__


def _may_be_left_out(item: Any) -> bool:
    return not isinstance(item, (Kept, RunInfo)) and not getattr(item, "alarms", ())


def name_of(writer: Any) -> str:
    """What messages call a writer: its `name`, or its class."""
    return str(getattr(writer, "name", None) or type(writer).__name__)
