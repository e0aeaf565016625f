"""`EventFile`: a file of length-prefixed, checksummed messages, as TensorBoard reads it.

Owns the framing (TFRecord), the checksum (CRC-32C), the file's name, and that a full disk leaves no torn message inside the
file: a reader stops at one, and would never see what comes after. What the messages say is the writer's part.

tensorboardX has all this too, but computes the checksum byte by byte in Python unless the package `crc32c` is there, which
takes three quarters of the time of a record with 1,000 scalars; and it names a file after the second in which it is opened,
and truncates an older one of this name.
"""
from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import socket
import struct
import time
from pathlib import Path

import numpy as np
from tensorboardX.crc32c import CRC_TABLE

try:
    from crc32c import crc32c as _native
except ImportError:
    _native = None

_PENDING = 1 << 20  # bytes that are held back at most
_BLOCK = 512  # bytes that are looked up at once; tables of 512 KB stay in a core's cache
_NAME = "events.out.tfevents."
_opened = itertools.count()


class EventFile:
    """Appends messages to a new file of a directory.

    Messages are held back until `flush`, `close`, the end of the program, or until they come to 1 MiB.

    Args:
        directory: Where; made where it does not exist. The file's name sorts behind those of all event files in it, since
            TensorBoard reads them in that order and never goes back. So it is even if the clock was set back.

    Raises:
        OSError: The file cannot be made, or, by the methods, cannot be written. Then it ends with the last message that is
            whole; up to 1 MiB of messages is kept for the next attempt, and more is lost.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        seconds = [int(found[1]) for found in map(re.compile(re.escape(_NAME) + r"(\d+)\.").match, os.listdir(directory))
                   if found]
        second = max([int(time.time()), *(each + 1 for each in seconds)])
        name = f"{_NAME}{second:010}.{socket.gethostname()}.{os.getpid()}.{next(_opened)}"
        self.path = directory / name
        self._file = open(self.path, "xb", buffering=0)
        self._pending = bytearray()
        self._size = 0  # bytes of whole messages
        self._torn = False
        self._process = os.getpid()
        atexit.register(self.close)

    def add(self, message: bytes) -> None:
        """Append one message."""
        length = struct.pack("<Q", len(message))
        self._pending += length + _masked(length) + message + _masked(message)
        if len(self._pending) >= _PENDING:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system, so that it survives the end of this process."""
        pending, self._pending = self._pending, bytearray()
        if not pending:
            return
        try:
            if self._torn:
                self._file.truncate(self._size)
                self._file.seek(self._size)
                self._torn = False
            rest = memoryview(pending)
            while rest:
                rest = rest[self._file.write(rest):]
        except OSError:
            self._torn = True
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            if len(pending) <= _PENDING:
                self._pending = pending
            raise
        self._size += len(pending)

    def close(self) -> None:
        """Flush, and close the file also where that fails. In a process that was forked from the writer's, do nothing."""
        if self._process != os.getpid() or self._file.closed:
            return
        atexit.unregister(self.close)
        try:
            self.flush()
        finally:
            self._file.close()


def _masked(data: bytes) -> bytes:
    """The checksum as TFRecord stores it: rotated and shifted, so that data which contain checksums do not check."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli; RFC 3720, appendix B.4) of some bytes.

    Without the package `crc32c`, a long message is looked up in blocks by NumPy: a CRC is linear, so that the one of a block
    is the exclusive or of what each byte in its place adds.

    Examples:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    if _native is not None:
        return int(_native(data))
    if len(data) < 64:
        crc = 0xFFFFFFFF
        for byte in data:
            crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
        return crc ^ 0xFFFFFFFF
    blocks = -(-len(data) // _BLOCK)
    padded = np.zeros(blocks * _BLOCK, np.uint8)
    start = padded.size - len(data)  # zeros in front change nothing, as long as the register is zero
    padded[start:] = np.frombuffer(data, np.uint8)
    padded[start:start + 4] ^= 0xFF  # the register's first value, all ones
    table, places, shift = _tables()
    crcs = np.bitwise_xor.reduce(table.take(padded.reshape(blocks, _BLOCK) + places), axis=1).tolist()
    crc = 0
    first, second, third, fourth = shift
    for each in crcs:
        crc = first[crc & 0xFF] ^ second[crc >> 8 & 0xFF] ^ third[crc >> 16 & 0xFF] ^ fourth[crc >> 24] ^ each
    return int(crc) ^ 0xFFFFFFFF


_made: list[tuple[np.ndarray, np.ndarray, list[list[int]]]] = []


def _tables() -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """What each byte adds to the CRC of a block, flat [_BLOCK * 256]; where each place begins; and the first four places,
    which are also what the register of the blocks before adds."""
    if not _made:
        single = np.array(CRC_TABLE, np.uint32)
        table = np.empty((_BLOCK, 256), np.uint32)
        table[-1] = single
        for place in range(_BLOCK - 2, -1, -1):  # one more byte of zeros behind it
            table[place] = single[table[place + 1] & 0xFF] ^ table[place + 1] >> 8
        _made.append((table.ravel(), np.arange(_BLOCK) * 256, table[:4].tolist()))
    return _made[0]
