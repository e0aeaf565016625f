"""`JsonlWriter`: JSON Lines, one object a record."""
from __future__ import annotations

import contextlib
import math
import os
from typing import Any, BinaryIO

import orjson

from instrument import runs
from instrument.record import Record
from instrument.writers.base import Writer


class JsonlWriter(Writer):
    """Appends each record to `metrics-00000.jsonl` of a run directory, and flushes it: a reader sees it at once.

    A line: `{"step": 10, "time": 1735387200.12, "loss": 2.3, "grad/norm": 0.8}`. JSON has no NaN and no infinity: such
    a value is null, and `"nonfinite": {"loss": "nan"}` in the same line says what it was: `nan`, `inf` or `-inf`.

    Args:
        run_dir: The run directory; made where it does not exist.
    """

    def __init__(self, run_dir: str | os.PathLike[str]):
        self.path = runs.metrics_file(run_dir).absolute()
        self._file: BinaryIO | None = None

    def write(self, record: Record) -> None:
        line = encode(record)
        file = self._file = self._file or self._open()
        try:
            file.write(line)
            file.flush()
        except OSError:
            # Half of the line may be in the file. Opening it anew finds that, and starts a new line.
            self._file = None
            with contextlib.suppress(OSError):
                file.close()
            raise

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self.path, "a+b")
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")  # whoever wrote here was killed within a line: do not glue ours to it
        return file


def encode(record: Record) -> bytes:
    """The line of a record, its newline included.

    Example:
        >>> encode(Record(3, 1735387200.0, {"loss": float("inf")}))
        b'{"step":3,"time":1735387200.0,"loss":null,"nonfinite":{"loss":"inf"}}\\n'
    """
    content: dict[str, Any] = {"step": record.step, "time": record.time, **record.values}
    nonfinite = {name: str(float(value)) for name, value in record.values.items() if not math.isfinite(value)}
    if nonfinite:
        content["nonfinite"] = nonfinite
    return orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)  # orjson writes null for what is not finite
