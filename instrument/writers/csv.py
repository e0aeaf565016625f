"""`CsvWriter`: one table of all numbers, for spreadsheets and data frames."""
from __future__ import annotations

import contextlib
import csv
import io
import os
from pathlib import Path
from typing import Any, BinaryIO

from instrument.record import Record
from instrument.writers.base import Writer

_BEGIN = ["step", "time"]
_CHUNK = 1 << 20


class CsvWriter(Writer):
    """Appends each record as a row of `metrics.csv`, and flushes it: a reader sees it at once.

    The columns are `step`, `time` (seconds since 1970), and the metrics in the order in which they were first seen. NaN and
    infinities are `nan`, `inf` and `-inf`; a metric that was not measured is empty. Lines end with a newline, text is UTF-8,
    and names with commas, quotes or newlines are quoted as RFC 4180 has it. Histograms, texts and alarms are left out, and
    a record that has nothing else gets no row.

    A metric that is seen for the first time, as those of validation after an epoch, becomes a new last column: the file is
    written anew beside the old one, with one more empty cell in each older row, and takes its place. So there is one table
    from the first step to the last, each row has as many cells as the header, and a reader sees the old table or the new one.
    Other ways are worse to read: a file for each set of columns has to be joined by hand, and a wide table with guessed
    columns or rows of several widths is refused by some readers. It costs a copy of the file (a second for a gigabyte) a few
    times in a run.

    A file that is there is continued, with its columns. A row that an earlier process was killed in is taken out, since no
    reader could tell it from a whole one. Steps that a resumed run makes once more have two rows, of which the later counts.

    Args:
        path: The file, where the name ends with `.csv`; otherwise the run directory, which gets `metrics.csv`. It is made
            where it does not exist.

    Raises:
        ValueError: By `write`: the file exists and is no table of a `CsvWriter`. It was not changed.
    """

    def __init__(self, path: str | os.PathLike[str]):
        given = Path(path).absolute()
        self.path = given if given.suffix == ".csv" else given / "metrics.csv"
        self._file: BinaryIO | None = None
        self._columns: list[str] = []

    def write(self, record: Record) -> None:
        if not record.values:
            return
        if self._file is None:
            self._file = self._open()
        known = set(self._columns)
        new = [name for name in record.values if name not in known]
        if new or self._file is None:
            self._widen(new)
        assert self._file is not None
        values = record.values
        row = _line([record.step, record.time, *(float(values[name]) if name in values else "" for name in self._columns)])
        try:
            self._file.write(row)
            self._file.flush()
        except OSError:
            # Half of the row may be in the file. Opening it anew takes it out.
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()
            raise

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> BinaryIO | None:
        """The file that is there, with whole rows only, and its columns; None where there is none."""
        self._columns = []
        if not self.path.exists() or self.path.stat().st_size == 0:
            return None
        with open(self.path, "r+b") as file:
            header = _header(file)
            names = next(csv.reader(io.StringIO(header.decode("utf-8", "replace"), newline="")), [])
            if not header or names[:2] != _BEGIN:
                raise ValueError(f"{str(self.path)!r} was not written by a CsvWriter: its first columns are not step and "
                                 "time. Give another path, or move the file away.")
            self._cut(file, len(header))
        self._columns = names[2:]
        return open(self.path, "ab")

    @staticmethod
    def _cut(file: BinaryIO, begin: int) -> None:
        """Take out what is behind the last newline."""
        size = end = file.seek(0, os.SEEK_END)
        while end > begin:
            start = max(end - _CHUNK, begin)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            end = start if found < 0 else start + found + 1
            if found >= 0:
                break
        if end < size:
            file.truncate(end)

    def _widen(self, new: list[str]) -> None:
        """Write the file anew, with empty cells for the `new` columns in every row that is there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        columns = [*self._columns, *new]
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(_line([*_BEGIN, *columns]))
                if self._file is not None:
                    with open(self.path, "rb") as old:
                        _header(old)
                        # Only the header can have newlines inside of cells: rows hold numbers alone.
                        for chunk in iter(lambda: old.read(_CHUNK), b""):
                            file.write(chunk.replace(b"\n", b"," * len(new) + b"\n"))
            self.close()
            os.replace(temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._file, self._columns = open(self.path, "ab"), columns


def _line(cells: list[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _header(file: BinaryIO) -> bytes:
    """The first row, in which a quoted name may have newlines; empty where it has no end."""
    header = b""
    for line in iter(file.readline, b""):
        header += line
        if line.endswith(b"\n") and header.count(b'"') % 2 == 0:
            return header
    return b""
