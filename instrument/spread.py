"""How far the ranks of a recorded run are apart in one metric, step by step.

Owns the comparison of what each rank has recorded. Metrics of the host, such as `step_time`, are compared here, when a run is
read, since a collective outside of the step's graph could keep training waiting. Does not import MindSpore.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """One metric over ranks. The arrays have one length.

    Attributes:
        step: int64 [n], ascending: steps that some rank has recorded.
        min: float64 [n], the smallest value; NaN only where each rank's is NaN.
        max: float64 [n], the largest value; NaN where one rank's is NaN.
        rank: int64 [n], which rank has the largest: the lowest of several. A value that is not finite counts as the largest.
        ranks: int64 [n], how many ranks have recorded the step.
    """

    step: np.ndarray
    min: np.ndarray
    max: np.ndarray
    rank: np.ndarray
    ranks: np.ndarray


def spread(columns: Iterable[tuple[int, np.ndarray, np.ndarray]]) -> Spread:
    """Compare.

    Args:
        columns: (rank, steps, values) of each rank, by rank; steps int64 ascending, values float64 of one length.

    Returns:
        The spread; empty arrays where there is nothing.
    """
    step, smallest, largest, score = np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0)
    which, number = np.empty(0, np.int64), np.empty(0, np.int64)
    for rank, steps, values in columns:
        missing = np.setdiff1d(steps, step, assume_unique=True)
        if len(missing):
            step = np.concatenate([step, missing])
            order = np.argsort(step, kind="stable")
            step = step[order]
            smallest, largest, score, which, number = (
                np.concatenate([column, np.full(len(missing), nothing, column.dtype)])[order] for column, nothing in
                ((smallest, np.nan), (largest, -np.inf), (score, -np.inf), (which, -1), (number, 0)))
        here = np.searchsorted(step, steps)
        scores = np.where(np.isfinite(values), values, np.inf)
        leads = scores > score[here]
        which[here[leads]] = rank
        score[here] = np.maximum(score[here], scores)
        smallest[here] = np.fmin(smallest[here], values)
        largest[here] = np.maximum(largest[here], values)
        number[here] += 1
    return Spread(step, smallest, largest, which, number)
