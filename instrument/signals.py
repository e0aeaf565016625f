"""What happens at SIGTERM, by which clusters end jobs: the records are brought to disk before the process goes.

Owns the one handler of this process, and that the handler which was there before has its say. SIGINT needs none: Python
raises KeyboardInterrupt, and contexts are left as by any other exception.
"""
from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

_listening: list[OnTermination] = []
# What our handler has replaced, the last one on top. More than one where somebody put a handler over ours, and we one over
# theirs: it may call ours again, which then goes on with what it had replaced first.
_before: list[Any] = []
_ending = False  # the functions are being called


class OnTermination:
    """Calls `function` once at SIGTERM, and then does what would have happened without it.

    A second signal does not interrupt the function. In a process that was forked from this one nothing is called, since
    there is nothing of its own to save.

    Args:
        function: Must return soon: a cluster kills what has not gone within some seconds.
    """

    def __init__(self, function: Callable[[], None]):
        self._function = function
        self._process = os.getpid()

    def install(self) -> None:
        """Only Python's main thread can; in another one nothing is done. A second call changes nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        current = signal.getsignal(signal.SIGTERM)
        if current is None:  # set by a library in C: it could not be put back
            return
        if current is not _handle:
            _before.append(current)
            signal.signal(signal.SIGTERM, _handle)
        if self not in _listening:
            _listening.append(self)

    def remove(self) -> None:
        """Not to be called any more; the handler from before is put back, unless somebody has put another one over ours."""
        if self in _listening:
            _listening.remove(self)
        if not _listening and not _ending:
            _put_back()

    def call(self) -> None:
        """Call the function; an error in it ends nothing."""
        if os.getpid() != self._process:
            return
        try:
            self._function()
        except BaseException:  # Ctrl-C too: the signal ends the process after this
            traceback.print_exc()


def _put_back() -> Any:
    """Take our handler away, if it is the one at work; what it had replaced."""
    at_work = signal.getsignal(signal.SIGTERM) is _handle
    if at_work and threading.current_thread() is not threading.main_thread():
        return None
    if not at_work and not _ending:
        return None  # ours may be called by the one that is; what it goes on with then stays known
    before = _before.pop() if _before else signal.SIG_DFL
    if at_work:
        signal.signal(signal.SIGTERM, before)
    return before


def _handle(number: int, frame: Any) -> None:
    global _ending
    if _ending:
        return  # what was recorded is on its way to the disk, and the first signal ends the process after that
    _ending = True
    try:
        while _listening:
            _listening.pop().call()
        before = _put_back()
    finally:
        _ending = False
    if callable(before):
        before(number, frame)
    elif before != signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), number)
