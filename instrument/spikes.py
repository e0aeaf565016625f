"""How far a step's loss and gradient norm stand above those of the last good steps.

Owns the history of good steps and the score made of it. Leaving an update out is the step's part.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from instrument import stats

# A score is known from so many good steps on (or from a full history, where that is shorter).
WARM_UP = 10

# A deviation below this part of the mean is float32 rounding, and is taken for this.
SMALLEST_DEVIATION = 1e-6


class SpikeScore(nn.Cell):
    """Standard score of loss and gradient norm against the last good steps.

    score = max over both of (x - mean) / max(deviation, 1e-6 |mean|), with mean and (population) deviation over the last
    `window` good steps, this one not among them; NaN before there are `WARM_UP` of them, and where loss or norm is not
    finite. A good step has a finite loss and gradient norm, and did its update.

    Args:
        window: Length of the history, in steps.
        history: float32 [window + 1, 2]; the first row holds how many good steps there have been, and the others their
            loss and gradient norm, in a ring.
    """

    def __init__(self, window: int, history: Parameter):
        super().__init__(auto_prefix=False)
        object.__setattr__(self, "history", history)
        self.window = Tensor(window, ms.int32)
        self.known_from = Tensor([float(min(window, WARM_UP))], ms.float32)
        self.places = Tensor(np.arange(window + 1)[:, None].repeat(2, 1), ms.int32)
        self.ring = Tensor(np.arange(window)[:, None].repeat(2, 1), ms.float32)
        self.length = Tensor(float(window), ms.float32)
        self.one = Tensor(1.0, ms.float32)
        self.zero = Tensor(0.0, ms.float32)
        self.unknown = Tensor([np.nan], ms.float32)
        self.nothing = Tensor(np.zeros((window, 2)), ms.float32)
        self.first = Tensor(np.arange(window + 1)[:, None].repeat(2, 1) == 0)
        self.smallest = Tensor(SMALLEST_DEVIATION, ms.float32)
        self.sum = ops.ReduceSum()
        self.max = ops.ReduceMax()
        self.select = ops.Select()

    def construct(self, values):
        """Score.

        Args:
            values: Loss and gradient norm, float32 [2].

        Returns:
            float32 [1].
        """
        count = self.history[0, :1]
        rows = self.history[1:]
        filled = ops.Less()(self.ring, ops.Minimum()(count, self.length))
        number = ops.Maximum()(ops.Minimum()(count, self.length), self.one)
        mean = self.sum(self.select(filled, rows, self.nothing), 0) / number
        offsets = self.select(filled, rows - mean, self.nothing)
        deviation = ops.Sqrt()(self.sum(offsets * offsets, 0) / number)
        scores = (values - mean) / ops.Maximum()(deviation, ops.Abs()(mean) * self.smallest)
        score = ops.reshape(self.max(scores), (1,))
        # A maximum may pass over NaN, and a score against nothing is none.
        unknown = ops.Less()(count, self.known_from)
        bad = ops.Greater()(ops.reshape(self.sum(stats.is_nonfinite(values)), (1,)), self.zero)
        return self.select(ops.LogicalOr()(unknown, bad), self.unknown, score)

    def remember(self, values, left_out):
        """Add a step to the history if it was good.

        Args:
            values: Loss and gradient norm, float32 [2].
            left_out: 1 where the update is left out, float32 [1].
        """
        count = self.history[0, :1]
        bad = self.sum(stats.is_nonfinite(values)) + ops.reshape(left_out, ())
        good = ops.Less()(bad, self.one)
        place = ops.FloorMod()(ops.cast(count, ms.int32), self.window) + 1
        here = ops.LogicalAnd()(ops.Equal()(self.places, place), good)
        history = self.select(here, ops.zeros_like(self.history) + values, self.history)
        counts = ops.zeros_like(self.history) + (count + ops.cast(good, ms.float32))
        return ops.assign(self.history, self.select(self.first, counts, history))
