"""Files of lines that only grow: what is in them survives a killed process, a full disk and a fork.

Owns rotation, repair of a torn last line, that a line is in a file as a whole or not at all, and how to make JSON of anything.
Knows nothing of what the lines say, but that each is one JSON object.
"""
from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

# How `dump` writes an object that people read.
INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE

_TAIL = 1 << 16


class LineFile:
    """Appends lines to `metrics-00000.jsonl`, `metrics-00001.jsonl` and so on, or to one file that is not rotated.

    A line goes out by one call of the operating system, on a descriptor that appends: nothing is held back in a buffer, which
    a killed process would lose and a forked one write a second time. What a full disk cut short is taken back. The file is
    opened by the first `write`, with its directory, and again after `close` or an error.

    Args:
        directory: Where the files lie; made where it does not exist.
        pattern: Name of the files, `*` standing for their number; one without it names one file.
        rotate_bytes: A line that would make a file larger than this begins the next one.
        rotate_seconds: So does a line that comes so long after this process began or opened the file.
        keep_last: How many files to keep; older ones are deleted when the next one begins. None keeps all.

    Attributes:
        due: Lines that go before the next one, with it or not at all.
    """

    def __init__(self, directory: Path, pattern: str, *, rotate_bytes: int | None = None,
                 rotate_seconds: float | None = None, keep_last: int | None = None):
        self.directory, self.pattern = directory, pattern
        self.rotate_bytes, self.rotate_seconds, self.keep_last = rotate_bytes, rotate_seconds, keep_last
        self.due = b""
        self._fd: int | None = None
        self._size = 0
        self._since = 0.0

    def write(self, lines: bytes = b"") -> None:
        """Append whole lines, each with its newline, and what is due.

        Raises:
            OSError: They could not be written, and no part of them was. The next call tries again with a file that is sound.
        """
        content = self.due + lines
        if not content:
            return
        fd = self._current(len(content))
        try:
            _append(fd, content)
        except OSError:
            self.close()  # opening it anew finds what could not be taken back
            raise
        self._size += len(content)
        self.due = b""

    def check(self) -> bool:
        """Let go of a file that somebody deleted, so that the next line goes where it is seen; whether there was one."""
        is_deleted = self._fd is not None and os.fstat(self._fd).st_nlink == 0
        if is_deleted:
            self.close()
        return is_deleted

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def files(self) -> list[Path]:
        """The files that there are, oldest first."""
        return numbered(self.directory, self.pattern)

    def _current(self, more: int) -> int:
        """The descriptor of the file that takes the next `more` bytes."""
        if self._fd is None:
            files = self.files()
            path = files[-1] if files else self._path(0)
            self.directory.mkdir(parents=True, exist_ok=True)
            repair(path)
            self._open(path)
        if "*" in self.pattern and self._size and (
                (self.rotate_bytes is not None and self._size + more > self.rotate_bytes)
                # A clock that nobody can set: by the time of day, a correction would begin a file, or none for hours.
                or (self.rotate_seconds is not None and time.monotonic() - self._since >= self.rotate_seconds)):
            self._open(self._path(_number(self.files()[-1].name, self.pattern) + 1 if self.files() else 0))
            if self.keep_last is not None:
                for old in self.files()[:-self.keep_last]:
                    with contextlib.suppress(OSError):
                        old.unlink()
        assert self._fd is not None
        return self._fd

    def _open(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        self.close()
        self._fd, self._size, self._since = fd, os.fstat(fd).st_size, time.monotonic()

    def _path(self, number: int) -> Path:
        return self.directory / self.pattern.replace("*", f"{number:05}")


def numbered(directory: Path, pattern: str) -> list[Path]:
    """Files of that pattern (see `LineFile`) in a directory, oldest first: by their number, not by name or time."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = [name for name in os.listdir(directory) if _number(name, pattern) >= 0]
        return [directory / name for name in sorted(names, key=lambda name: _number(name, pattern))]
    return []


def repair(path: Path) -> int:
    """Make a file end with a whole line: whoever wrote it may have been killed, or may have found the disk full.

    What follows the last newline is cut off, unless it is a whole JSON object, which gets its newline.

    Returns:
        How many bytes were cut off.

    Raises:
        OSError: The file cannot be read or changed. One that does not exist is no error.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        return 0
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return 0
        tail, start = b"", status.st_size
        while start > 0 and b"\n" not in tail:
            step = min(_TAIL, start)
            start -= step
            os.lseek(fd, start, os.SEEK_SET)
            tail = os.read(fd, step) + tail
        torn = tail[tail.rfind(b"\n") + 1:]
        if not torn:
            return 0
        if is_object(torn):
            _append(fd, b"\n")
            return 0
        os.ftruncate(fd, status.st_size - len(torn))
        return len(torn)
    finally:
        os.close(fd)


def is_object(line: bytes) -> bool:
    """Whether a line is one whole JSON object."""
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _append(fd: int, content: bytes) -> None:
    """Write all of it, or leave the file as it was."""
    written = 0
    try:
        while written < len(content):  # a disk that fills up takes a part, and refuses the rest
            written += os.write(fd, content[written:] if written else content)
    except OSError:
        if written:
            end = os.lseek(fd, 0, os.SEEK_CUR)  # of what was written last
            with contextlib.suppress(OSError):
                if os.fstat(fd).st_size == end:  # otherwise somebody else wrote behind it
                    os.ftruncate(fd, end - written)
        raise


def _number(name: str, pattern: str) -> int:
    """The number in a file's name; 0 for the one file of a pattern without `*`, and -1 for other names."""
    before, star, after = pattern.partition("*")
    if not star:
        return 0 if name == pattern else -1
    match = re.fullmatch(re.escape(before) + r"(\d+)" + re.escape(after), name)
    return int(match.group(1)) if match else -1


def dump(content: dict[str, Any], *, option: int = orjson.OPT_APPEND_NEWLINE) -> bytes:
    """JSON of an object, whatever is in it: what JSON does not have becomes text (see `plain`)."""
    try:
        return orjson.dumps(content, option=option)
    except TypeError:
        return orjson.dumps(plain(content), option=option)


def replace(path: Path, content: dict[str, Any]) -> None:
    """Write an object to a file of its own, for people to read: whoever looks sees the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(dump(content, option=INDENTED))
    os.replace(temporary, path)


def plain(value: Any) -> Any:
    """The value in the types that JSON has.

    NumPy's scalars become numbers, NaN and infinities `"nan"`, `"inf"` and `"-inf"`, other objects their text. A lone
    surrogate, which stands for a byte that is no UTF-8 in an argument or a file name, is written out: `\\udcff`.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {plain(str(name)): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if isinstance(value, int):
        return int(value) if -2**63 <= value < 2**64 else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, np.generic):
        return plain(value.item()) if not isinstance(value.item(), np.generic) else str(value)
    return plain(str(value))
