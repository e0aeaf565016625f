"""The bytes of a run's files, as they grow: whole lines, each once and in order, whatever happens to the files meanwhile.

Owns rotation, truncation, replaced files, the torn last line and files that appear late. Knows nothing of what lines say.
Everything is found by polling and by opening the file anew: a network file system tells no watcher of what another host
wrote, and looks again at the size of a file when it is opened.
"""
from __future__ import annotations

import errno
import io
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

# Bytes that one poll reads of a file at most, so that reading a long history can show how far it is.
BLOCK = 8 << 20
# A line with more bytes is none, and is not waited for.
_LONGEST = 64 << 20
# So many bytes of a file's beginning, and of the end of what was read, tell whether it is still the same file.
_KNOWN = 128
# A file's writer may be on another host. Before its successor is begun, nothing must have come for so long, in seconds.
_LATE = 2.0


@dataclass(frozen=True)
class Lines:
    """What came since the last poll.

    Attributes:
        content: Whole lines with their newlines; empty where nothing came.
        restarted: What was read before is no more: the file was replaced or shortened, and `content` begins anew.
    """

    content: bytes = b""
    restarted: bool = False


class FileTail:
    """Reads one file on from where it stopped. A file that does not exist has no lines.

    Args:
        path: The file.

    Attributes:
        offset: Where the first line begins that was not read yet.
        pending: Whether bytes follow there that end with no newline: a line that is being written, or a torn one.
    """

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.pending = False
        self._head = self._last = b""

    def poll(self, limit: int = BLOCK) -> Lines:
        """The whole lines that follow, up to about `limit` bytes, and one line however long it is.

        Raises:
            OSError: The file is there and cannot be read.
        """
        file = open_regular(self.path)
        if file is None:
            return Lines()
        with file:
            head = file.read(len(self._head)) if self._head else b""
            file.seek(self.offset - len(self._last))
            content = _read(file, len(self._last) + limit)
            restarted = head != self._head or not content.startswith(self._last)
            if restarted:
                self.offset, self._head, self._last = 0, b"", b""
                file.seek(0)
                content = _read(file, limit)
            content = content[len(self._last):]
            end = content.rfind(b"\n") + 1
            while not end and len(content) >= limit:
                if len(content) >= _LONGEST:
                    raise OSError(f"{self.path.name} has a line of more than {_LONGEST >> 20} MiB, which no writer makes")
                more = _read(file, limit)
                if not more:
                    break
                end = more.rfind(b"\n") + 1 + len(content) if b"\n" in more else 0
                content += more
            self.pending = len(content) > end
            if not self.offset and end:
                self._head = content[:min(_KNOWN, end)]
            self._last = (self._last + content[max(end - _KNOWN, 0):end])[-_KNOWN:]
            self.offset += end
            return Lines(content[:end], restarted)

    def begin_at(self, offset: int) -> None:
        """Go on there, as if what is before had been polled."""
        file = open_regular(self.path)
        if file is not None:
            with file:
                self._head = file.read(min(_KNOWN, offset))
                file.seek(max(offset - _KNOWN, 0))
                self._last = file.read(min(_KNOWN, offset))
            self.offset = offset

    def size(self) -> int:
        """Bytes of the file now; 0 where there is none."""
        try:
            return os.stat(self.path).st_size
        except OSError:
            return 0


class SeriesTail:
    """Reads files that follow each other, `metrics-00000.jsonl`, `metrics-00001.jsonl` and so on, as one.

    Old files may be deleted; those that were read are then kept by who asked for their lines.

    Args:
        directory: Where they lie. It may appear later.
        pattern: Their name, with `*` for the number. Without `*`: the one file of that name.
    """

    def __init__(self, directory: Path, pattern: str):
        self.directory, self.pattern = directory, pattern
        self._number = -1
        self._file: FileTail | None = None
        self._quiet_since: float | None = None
        self._bytes_before = 0  # of the files that are done

    def poll(self, limit: int = BLOCK) -> Lines:
        """As `FileTail.poll`, across files."""
        # Listed before it is read: what the listing's newest file follows is then complete on a local disk.
        numbers = self._numbers()
        if not numbers:
            return self._restart() if self._file is not None and not self._file.path.exists() else Lines()
        if self._file is None:
            self._begin(numbers[0])
        elif numbers[-1] < self._number:
            return self._restart()
        assert self._file is not None
        lines = self._file.poll(limit)
        if lines.content or lines.restarted:
            self._quiet_since = None
            return lines
        later = [number for number in numbers if number > self._number]
        if later and self._is_done(later[0]):
            self._bytes_before += self._file.offset
            self._begin(later[0])
            return self._file.poll(limit)
        return lines

    def begin_at(self, path: Path, offset: int) -> None:
        """Go on in this one of the files there, as if what is before had been polled."""
        numbers = [number for number in self._numbers() if self._path(number) == path]
        if numbers:
            self._begin(numbers[0])
            assert self._file is not None
            self._file.begin_at(offset)

    def files(self) -> list[Path]:
        """The files that there are now, oldest first."""
        return [self._path(number) for number in self._numbers()]

    def progress(self) -> tuple[int, int]:
        """Bytes read so far, and bytes that there are to read in all."""
        done = self._bytes_before + (self._file.offset if self._file is not None else 0)
        left = 0
        for number in self._numbers():
            if number >= self._number:
                left += FileTail(self._path(number)).size()
        left -= self._file.offset if self._file is not None else 0
        return done, done + max(left, 0)

    def _is_done(self, later: int) -> bool:
        """Whether nothing more is to be expected of the current file, one with a higher number being there."""
        assert self._file is not None
        try:
            age = time.time() - os.stat(self._file.path).st_mtime
        except OSError:
            return True  # deleted
        if age > _LATE and later == self._number + 1:
            return True
        if self._quiet_since is None:
            self._quiet_since = time.monotonic()
        # The next number may only not be visible yet, and so may the rest of a line.
        wait = _LATE if self._file.pending or later != self._number + 1 else _LATE / 8
        return time.monotonic() - self._quiet_since >= wait

    def _begin(self, number: int) -> None:
        self._number, self._file, self._quiet_since = number, FileTail(self._path(number)), None

    def _restart(self) -> Lines:
        """All files were deleted, or began again at a lower number: another run is in the directory now."""
        self._number, self._file, self._quiet_since, self._bytes_before = -1, None, None, 0
        return Lines(restarted=True)

    def _path(self, number: int) -> Path:
        if "*" not in self.pattern:
            return self.directory / self.pattern
        return self._found.get(number) or self.directory / self.pattern.replace("*", f"{number:05}")

    def _numbers(self) -> list[int]:
        before, star, after = self.pattern.partition("*")
        if not star:
            return [0] if (self.directory / self.pattern).exists() else []
        self._found: dict[int, Path] = {}
        try:
            names = os.listdir(self.directory)
        except OSError:
            return []
        for name in names:
            number = name[len(before):len(name) - len(after)]
            if name.startswith(before) and name.endswith(after) and number.isascii() and number.isdigit():
                self._found[int(number)] = self.directory / name
        return sorted(self._found)


def open_regular(path: Path) -> io.FileIO | None:
    """Open a file for reading, itself and not what a link leads to; None where there is none, or it is no regular file.

    A run directory may be written by others than those who look at it: a link in it must not show another file, and a FIFO
    must not keep its reader waiting.

    Raises:
        OSError: The file is there and cannot be read.
    """
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_BINARY", "O_CLOEXEC"))
    try:
        fd = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, and links are not followed", str(path)) from None
        raise
    file = io.FileIO(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    if file is None:
        os.close(fd)
    return file


def read_small(path: Path, limit: int = 16 << 20) -> bytes | None:
    """All of a small file, such as `config.json`; None where it cannot be read."""
    try:
        file = open_regular(path)
        if file is None:
            return None
        with file:
            return _read(file, limit)
    except OSError:
        return None


def _read(file: io.FileIO, limit: int) -> bytes:
    """Up to `limit` bytes, in as many reads as the system wants."""
    parts, left = [], limit
    while left > 0:
        part = file.read(left)
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
