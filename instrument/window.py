"""The last vectors of a step, kept on the device until they are read.

Owns the ring buffer and what was lost of it. A data sink runs many steps in one call, and a callback sees only the last.
"""
from __future__ import annotations

from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from instrument.buffers import own_name


class Window(NamedTuple):
    """What `InstrumentedStep.read_window` returns.

    Attributes:
        rows: float32 [n, K], one row a measured step, in their order; each is laid out by the step's schema.
        overwritten: How many measured steps were overwritten before they could be read; where the steps up to `after` had
            not all been read, at most so many.
    """

    rows: np.ndarray
    overwritten: int


class RingBuffer(nn.Cell):
    """The last rows that were pushed.

    Args:
        rows: How many rows are kept.
        columns: Length of a row.
    """

    def __init__(self, rows: int, columns: int):
        super().__init__(auto_prefix=False)
        # Each row ends with its serial number from 1, which tells how many came before: exact up to 2**24.
        self.buffer = Parameter(Tensor(np.zeros((rows, columns + 1)), ms.float32), name=own_name("window"),
                                requires_grad=False)
        self.pushed = Parameter(Tensor([0], ms.int32), name=own_name("pushed"), requires_grad=False)
        self.rows = Tensor(rows, ms.int32)
        self.update = ops.ScatterUpdate()
        self.concat = ops.Concat()
        self.read_up_to = 0, 0  # step and serial number of the last row that was read

    def construct(self, row):
        """Write. Args: row: float32 [columns]."""
        place = ops.FloorMod()(self.pushed, self.rows)
        serial = self.pushed + 1
        row = self.concat((row, ops.cast(serial, ms.float32)))
        return self.update(self.buffer, place, ops.reshape(row, (1, -1))), ops.assign(self.pushed, serial)

    def read(self, after: int | None, columns: int) -> Window:
        """Rows whose first element is above `after`, by default those after the last one read; one device-to-host copy."""
        data = np.array(self.buffer.asnumpy())  # a copy: on a CPU it would be a view
        data = data[np.argsort(data[:, -1])]
        data = data[data[:, -1] > 0]
        kept_from = data[0, -1] if len(data) else 0
        last_step, last_serial = self.read_up_to
        if after is None:
            # By serial number: a run that has gone back to an earlier checkpoint counts steps again.
            rows, before = data[data[:, -1] > last_serial], last_serial
        else:
            # Of a run that has gone back, the steps that it does again are not what led to the present one.
            lowest_from_here = np.minimum.accumulate(data[::-1, 0])[::-1]
            data = data[data[:, 0] < np.append(lowest_from_here[1:], np.inf)]
            rows = data[data[:, 0] > after]
            if len(rows) < len(data):
                before = int(kept_from)  # the row before these is there, so that nothing between has gone
            else:
                before = last_serial if last_step <= after else 0
        overwritten = max(int(kept_from) - 1 - before, 0) if len(rows) else 0
        if len(rows):
            self.read_up_to = int(rows[-1, 0]), int(rows[-1, -1])
        return Window(rows[:, :columns].copy(), overwritten)
