"""The bins of a histogram of magnitudes, and what the host makes of counts. Knows nothing of MindSpore.

Owns where the bins lie, how counts are carried in float32, how they merge, and quantiles. The counting on the device is in
`histograms.py`.

The edges are the same for every tensor, step and rank, so histograms merge by addition. There is one bin for each power of
two and sign: bin `k` holds 2**k <= |x| < 2**(k + 1), for k from `LOWEST` to `HIGHEST` - 1, which covers what float16 can hold
and the gradients that Adam still makes use of. The lowest bin of each sign also holds what is smaller, and the highest what
is larger, so that nothing is left out. One bin holds zeros, and one NaN and both infinities. Magnitudes below 2**-126
(denormal float32 numbers) count as zeros: worker threads flush them to zero, the main thread does not.
"""
from __future__ import annotations

from typing import Any

import numpy as np

LOWEST, HIGHEST = -40, 24
OCTAVES = HIGHEST - LOWEST

# Counts in their order: negative bins from the largest magnitude down, zeros, positive bins upward, non-finite elements.
ZERO = OCTAVES
NONFINITE = 2 * OCTAVES + 1
BINS = NONFINITE + 1

# What is smaller counts as zero: the smallest normal float32.
SMALLEST = 2.0 ** -126

# A float32 is exact to 2**24 only, so a count is carried as high * PART + low, with low < PART. Both parts stay exact when
# up to 4,096 vectors with up to 2**36 elements in all are added.
PART = 4096
CARRIED = 2 * BINS


def edges() -> np.ndarray:
    """Edges of the finite bins, for plotting.

    Returns:
        float64 [`BINS`], ascending: bin `i` lies between elements `i` and `i + 1`. The zero bin is drawn between the two
        lowest bins, and the outermost bins as wide as their power of two.
    """
    magnitudes = 2.0 ** np.arange(LOWEST, HIGHEST + 1)
    return np.concatenate([-magnitudes[::-1], magnitudes])


def occupied(counts: np.ndarray) -> tuple[int, int]:
    """The first bin that holds something, and the one behind the last; (0, 0) where all are empty."""
    used = np.flatnonzero(counts)
    return (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)


def from_carried(carried: Any) -> np.ndarray:
    """Counts of what the device carried, after any additions.

    Args:
        carried: float32 [`CARRIED`], the high parts and then the low ones.

    Returns:
        int64 [`BINS`].
    """
    high, low = np.asarray(carried, np.float64).reshape(2, BINS).astype(np.int64)
    return high * PART + low


def merge(*counts: Any) -> np.ndarray:
    """The histogram of several: of ranks, steps or tensors.

    Args:
        counts: Each int64 [`BINS`].

    Returns:
        int64 [`BINS`].

    Raises:
        ValueError: There is none, or one is no vector of counts.

    Examples:
        >>> merge(np.ones(BINS, int), np.ones(BINS, int))[ZERO]
        2
    """
    if not counts:
        raise ValueError("merge needs at least one vector of counts, but was given none.")
    return np.sum([_checked(each) for each in counts], 0)


def quantiles(counts: Any, q: Any) -> np.ndarray:
    """Quantiles of the finite elements, estimated.

    The quantile `q` of n elements is the one of rank ceil(q * n), counted from 1 and not below it (NumPy's `inverted_cdf`).
    What bin it is in is known exactly; within the bin the logarithm of the magnitude is interpolated.

    The error: the estimate has the sign of the exact quantile and is wrong by less than a factor of 2, for magnitudes from
    2**-40 to 2**24. Zeros (magnitudes below 2**-126) are exactly 0. In the lowest bins, which hold what is smaller as well,
    the error is less than 2**-39; in the highest, which hold what is larger as well, there is no bound upward.

    Args:
        counts: int64 [`BINS`].
        q: One fraction from 0 to 1, or several.

    Returns:
        float64 of the shape of `q`; NaN where no element is finite.

    Raises:
        ValueError: `counts` is no vector of counts, or a fraction is not between 0 and 1.

    Examples:
        >>> counts = np.zeros(BINS, int); counts[ZERO + 1 - LOWEST] = 100       # from 1 to 2
        >>> quantiles(counts, 0.5).round(3)
        1.409
    """
    counts, q = _checked(counts), np.asarray(q, np.float64)
    if not ((q >= 0) & (q <= 1)).all():
        raise ValueError(f"`q` must be fractions between 0 and 1, but it is {q.tolist()}.")
    finite = counts[:NONFINITE]
    ends = np.cumsum(finite)
    if ends[-1] == 0:
        return np.full(q.shape, np.nan)[()]
    rank = np.clip(np.ceil(q * ends[-1]), 1, ends[-1])
    found = np.searchsorted(ends, rank)  # the first bin that ends at this rank or after it
    inside = (rank - (ends - finite)[found] - 0.5) / finite[found]  # strictly between 0 and 1
    positive = 2.0 ** (LOWEST + found - ZERO - 1 + inside)
    negative = -2.0 ** (LOWEST + ZERO - found - inside)
    return np.where(found == ZERO, 0.0, np.where(found > ZERO, positive, negative))[()]


def _checked(counts: Any) -> np.ndarray:
    counts = np.asarray(counts)
    if counts.shape != (BINS,) or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ValueError(f"counts must be {BINS} whole numbers from 0, one a bin, but they are {counts.dtype} of shape "
                         f"{counts.shape}. Take them from schema.histograms(stats).")
    return counts.astype(np.int64)
