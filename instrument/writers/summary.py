"""`SummaryRecordWriter`: summary files for MindInsight, through MindSpore's own `SummaryRecord`."""
from __future__ import annotations

import inspect
import os
import time
from pathlib import Path
from typing import Any

from instrument.record import Record
from instrument.writers.base import Writer
from instrument.writers.extras import require


class SummaryRecordWriter(Writer):
    """Writes the numbers of each record as scalars into a summary directory of MindInsight.

    Histograms, texts and alarms are left out: `SummaryRecord` takes whole tensors and no counts. So is what
    `ScalarSummary` and its like in the network record, for which there is MindSpore's `SummaryCollector`. A scalar has the
    time of its writing.

    `SummaryRecord` has limits of its own:

    - A process can have one at a time, and `SummaryCollector` holds one while it is used.
    - It writes in processes of its own, which look for work without a pause: they keep one core busy all the time.
    - Each number becomes a Tensor, which takes about 0.1 ms; JsonlWriter and TensorBoardWriter take less than 0.001 ms.
    - It is forked from the running process; MindSpore 2.0 starts the script anew instead, which therefore needs
      `if __name__ == "__main__":`, as with Python's multiprocessing.

    Args:
        summary_dir: The summary directory; made where it does not exist.

    Raises:
        RuntimeError: By `write`: the process has a SummaryRecord already, or MindSpore's writing process has ended by itself.
        ImportError: By `write`: MindSpore is not installed.
    """

    def __init__(self, summary_dir: str | os.PathLike[str]):
        self.summary_dir = Path(summary_dir).absolute()
        self._summary: Any = None
        self._failed = ""

    def write(self, record: Record) -> None:
        if self._failed:
            raise RuntimeError(self._failed)
        self._summary = self._summary or self._open()
        if not record.values:
            return
        tensor = require("mindspore", "mindspore").Tensor
        for name, value in record.values.items():
            self._summary.add_value("scalar", name, tensor(float(value)))
        self._wait()
        self._summary.record(int(record.step))

    def flush(self) -> None:
        if self._summary is not None:
            self._wait()
            self._summary.flush()

    def close(self) -> None:
        summary, self._summary = self._summary, None
        if summary is not None:
            summary.close()

    def _open(self) -> Any:
        require("mindspore", "mindspore")
        SummaryRecord = require("mindspore.train.summary", "mindspore").SummaryRecord
        if SummaryRecord.count > 0:
            raise RuntimeError("MindSpore allows one SummaryRecord in a process at a time, and there is one: a "
                               "SummaryCollector, another SummaryRecordWriter, or one of your own. Use one of them, or close "
                               "it first.")
        # MindSpore names a file after the second, and truncates one of the same name.
        while any(self.summary_dir.glob(f"*.out.events.summary.{int(time.time())}.*")):
            time.sleep(0.05)
        few = {"num_process": 1} if "num_process" in inspect.signature(SummaryRecord).parameters else {}
        summary = SummaryRecord(str(self.summary_dir), **few)
        # In mode "train", `record` would take the data of the network's summary operators, and on Ascend run operators for
        # that, from this thread.
        summary.set_mode("eval")
        return summary

    def _wait(self) -> None:
        """Wait until MindSpore's process has room for more: `put` into the queue of one that has ended would never return."""
        process = getattr(self._summary, "_event_writer", None)
        queue = getattr(process, "_queue", None)
        if process is None or queue is None:
            return
        while process.is_alive() and queue.full():
            time.sleep(0.005)
        if process.is_alive():
            return
        queue.cancel_join_thread()  # else the end of this program waits for somebody to read the queue
        self.close()
        self._failed = (f"MindSpore's process that writes {str(self.summary_dir)!r} has ended with exit code "
                        f"{process.exitcode}, and printed why to stderr. With MindSpore 2.0, check that the script runs "
                        'training under `if __name__ == "__main__":`; otherwise use TensorBoardWriter.')
        raise RuntimeError(self._failed)
