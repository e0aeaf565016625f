"""A signal that Python cannot answer: its main thread is in a call of C, such as a step that waits for another rank.

Python runs handlers between two of its own instructions in the main thread; while there is none, a process with a handler of
SIGTERM does not end by it, as it would without. Owns the thread that learns of a signal at once all the same.
"""
from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

# How long the main thread has to come back to its handler: a step may take some seconds.
SECONDS_TO_ANSWER = 3.0


class Wakeup:
    """Calls `unanswered` from a thread of its own where the main thread has not answered a signal in time.

    By `signal.set_wakeup_fd`, of which a process has one: where it is in use, as in a program that runs asyncio in its main
    thread, nothing is done.

    Args:
        number: The signal.
        unanswered: What to call.
    """

    def __init__(self, number: int, unanswered: Callable[[], None]):
        self.number, self.unanswered = number, unanswered
        self._answered = -float("inf")
        self._reader, self._writer = -1, -1
        os.register_at_fork(after_in_child=self._forget)

    def listen(self) -> None:
        """Begin; of the main thread only. A second call changes nothing."""
        if self._writer < 0:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            threading.Thread(target=self._watch, args=(self._reader,), name="instrument-signals", daemon=True).start()
        self._tell_of_signals(self._writer)

    def stop(self) -> None:
        """Hear no more; of the main thread only."""
        self._tell_of_signals(-1)

    def _tell_of_signals(self, descriptor: int) -> None:
        before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        if before not in (-1, self._writer):  # somebody else's
            signal.set_wakeup_fd(before)

    def answer(self) -> None:
        """Say that the handler runs."""
        self._answered = time.monotonic()

    def _watch(self, reader: int) -> None:
        while True:
            heard = os.read(reader, 512)
            if self.number not in heard:
                continue
            at = time.monotonic()
            time.sleep(SECONDS_TO_ANSWER)
            if self._answered < at - 1.0:  # the handler may have been quicker than this thread
                self.unanswered()

    def _forget(self) -> None:
        """A forked process has the descriptors of its parent, which must not hear of the child's signals."""
        if self._writer < 0:
            return
        with contextlib.suppress(ValueError):  # not in its main thread
            self.stop()
        os.close(self._reader)
        os.close(self._writer)
        self._reader = self._writer = -1
