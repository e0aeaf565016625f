"""What happens at SIGTERM, by which clusters end jobs: the records are brought to disk before the process goes.

Owns the one handler of this process, and that the handler which was there before has its say. Where the main thread cannot
run it, because it waits in C for other ranks, another thread does the same. SIGINT needs none: Python raises
KeyboardInterrupt, and contexts are left as by any other exception.
"""
from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from instrument.wakeup import Wakeup

# For the functions, where another thread calls them: what they read may be what the main thread is stuck in.
_SECONDS_WITHOUT_THE_MAIN_THREAD = 12.0

_listening: list[OnTermination] = []
# What our handler has replaced, the last one on top. More than one where somebody put a handler over ours, and we one over
# theirs: it may call ours again, which then goes on with what it had replaced first.
_before: list[Any] = []
_ending = False  # the functions are being called
_turns = [True]  # who takes it calls the functions: the main thread, or the one that does without it


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
        _wakeup.listen()

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
        _wakeup.stop()
    return before


def _handle(number: int, frame: Any) -> None:
    global _ending
    _wakeup.answer()
    if _ending:
        return  # what was recorded is on its way to the disk, and the first signal ends the process after that
    try:
        turn = _turns.pop()
    except IndexError:
        time.sleep(_SECONDS_WITHOUT_THE_MAIN_THREAD)  # the other thread was quicker: it ends the process
        return
    _ending = True
    try:
        _call_all()
        before = _put_back()
    finally:
        _ending = False
        _turns.append(turn)
    if callable(before):
        before(number, frame)
    elif before != signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _call_all() -> None:
    while _listening:
        _listening.pop().call()


def _unanswered() -> None:
    """In another thread, while the main one is in C: the functions, and then what the signal does by default."""
    if _before != [signal.SIG_DFL] or signal.getsignal(signal.SIGTERM) is not _handle:
        return  # a handler of somebody else would have waited for the main thread too
    try:
        _turns.pop()
    except IndexError:
        return
    calls = threading.Thread(target=_call_all, daemon=True)
    calls.start()
    calls.join(_SECONDS_WITHOUT_THE_MAIN_THREAD)
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # SIG_DFL; Python's own function is for the main thread alone
    os.kill(os.getpid(), signal.SIGTERM)


_wakeup = Wakeup(signal.SIGTERM, _unanswered)
