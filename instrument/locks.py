"""Who is writing in a run directory: a lock that ends with its process, however that ends.

Owns the file `run.lock` and its meaning. What a run directory holds is the part of `runs.py`.

The lock is POSIX's (`fcntl.lockf`), and not BSD's (`flock`): it belongs to a process and is not inherited by `fork`, so that
the worker processes of a dataset, which may live on when their parent is killed, keep no run locked. Its one weakness is that
it ends when its process closes any descriptor of the file, as a copy of the whole directory does. Hence the file also says
who holds it, and a process on this host that still lives is believed. Where a file system has no locks, that is all there is.
"""
from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any

import orjson
import psutil

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"

# A look at somebody's lock takes it for a moment (`holder`), so one that is taken is tried again for this long, in seconds.
_PATIENCE = 0.5

# Directories, by device and inode, that this process holds: it must not open their lock files again.
_held: dict[tuple[int, int], int] = {}


class RunInUse(FileExistsError):
    """A living process writes in the run directory; the message names it by host and number."""


class Lock:
    """Holds a directory until `close`, or until this object or its process is gone. Made by `acquire`."""

    def __init__(self, directory: Path, fd: int):
        self._release = weakref.finalize(self, _release, directory / LOCK, fd, _key(directory), os.getpid())

    @property
    def is_held(self) -> bool:
        """Whether `close` is yet to come."""
        return self._release.alive

    def close(self) -> None:
        """Let others have it. Closing twice is no error, and a forked process only closes its copy."""
        self._release()


def acquire(directory: Path) -> Lock:
    """Take a directory for this process.

    Raises:
        RunInUse: A living process has it.
        OSError: The lock file cannot be written.
    """
    if _held.get(_key(directory)) == os.getpid():
        raise _in_use(directory, {"host": socket.gethostname(), "pid": os.getpid()})
    deadline = time.monotonic() + _PATIENCE
    while True:
        fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = _lock(fd)
            owner = _read(fd)
            if locked is False:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                raise _in_use(directory, owner)
            if not _is_at(fd, directory / LOCK):
                continue  # its owner let go of it, and deleted it, between our two calls
            if _lives(owner, locked):
                raise _in_use(directory, owner)
            _write(fd, {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()})
            _held[_key(directory)] = os.getpid()
            lock, fd = Lock(directory, fd), -1
            return lock
        finally:
            if fd >= 0:
                os.close(fd)


def holder(directory: Path) -> dict[str, Any] | None:
    """Who has the directory: `{"host", "pid"}`, empty where that cannot be read; None where nobody has it."""
    with contextlib.suppress(FileNotFoundError):
        if _held.get(_key(directory)) == os.getpid():
            return {"host": socket.gethostname(), "pid": os.getpid()}
        fd = os.open(directory / LOCK, os.O_RDWR)
        try:
            locked = _lock(fd)
            owner = _read(fd)
            return owner if locked is False or _lives(owner, locked) else None
        finally:
            os.close(fd)
    return None


def _lock(fd: int) -> bool | None:
    """True if it is ours now, False if another process has it, None where the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as POSIX leaves open
        return False
    except OSError:
        return None
    return True


def _lives(owner: dict[str, Any], locked: bool | None) -> bool:
    """Whether whom the file names is another process that still runs, as far as can be told from here."""
    if not owner or (owner.get("host") == socket.gethostname() and owner.get("pid") == os.getpid()):
        return False
    if owner.get("host") != socket.gethostname():
        return locked is None  # its lock would have told
    try:
        # By its start, too: the number may be another process's now.
        return abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) < 2
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def _read(fd: int) -> dict[str, Any]:
    os.lseek(fd, 0, os.SEEK_SET)
    with contextlib.suppress(orjson.JSONDecodeError):
        content = orjson.loads(os.read(fd, 4096))
        return content if isinstance(content, dict) else {}
    return {}


def _write(fd: int, owner: dict[str, Any]) -> None:
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    os.write(fd, orjson.dumps(owner, option=orjson.OPT_APPEND_NEWLINE))


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _key(directory: Path) -> tuple[int, int]:
    status = os.stat(directory)
    return status.st_dev, status.st_ino


def _release(path: Path, fd: int, key: tuple[int, int], pid: int) -> None:
    if os.getpid() == pid:
        _held.pop(key, None)
        # Deleted before the lock ends, so that who finds the file finds it locked; see `_is_at`.
        with contextlib.suppress(OSError):
            path.unlink()
    os.close(fd)


def _in_use(directory: Path, owner: dict[str, Any]) -> RunInUse:
    host, pid = owner.get("host"), owner.get("pid")
    if (host, pid) == (socket.gethostname(), os.getpid()):
        return RunInUse(f"the run directory {str(directory)!r} is in use by this process (host {host!r}, pid {pid}): close "
                        "the monitor that writes there, or give another directory.")
    who = f"process {pid} on host {host!r}" if owner else "another process"
    return RunInUse(f"the run directory {str(directory)!r} is in use by {who}. Wait for it to end, or stop it, and resume "
                    f"then; or give another directory. If it is gone for certain, delete {str(directory / LOCK)!r}.")
