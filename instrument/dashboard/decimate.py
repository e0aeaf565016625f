"""Which few of a curve's points are drawn, and the means that smooth it. Functions of arrays.

Steps are cut into buckets of one width, a power of two, that begin at multiples of it. Of each bucket the points with the
least and the largest finite value are drawn, and the first one that is not finite: a spike of one step and a NaN stay seen
at any scale, and every point drawn is one that was measured. What a bucket shows depends on nothing outside of it, so a
growing curve changes in its last bucket only.
"""
from __future__ import annotations

import numpy as np

# So many buckets of two points each are on the wire for a curve that is not zoomed in, at most.
BUCKETS = 1000

_LARGEST = float(np.finfo(np.float64).max)


def width_for(span: int, buckets: int = BUCKETS) -> int:
    """The width of buckets, a power of two, with which `span` steps make at most `buckets` of them.

    Examples:
        >>> width_for(1000), width_for(1001), width_for(1_000_000)
        (1, 2, 1024)
    """
    width = 1
    while span > width * buckets:
        width *= 2
    return width


def bucket_starts(steps: np.ndarray, width: int) -> np.ndarray:
    """Where the buckets begin.

    Args:
        steps: int64 [n], ascending.
        width: A power of two.

    Returns:
        int64 [buckets that hold a step], indices into `steps`.
    """
    if not len(steps):
        return np.zeros(0, np.int64)
    bucket = steps >> (width.bit_length() - 1)
    return np.concatenate([[0], np.flatnonzero(bucket[1:] != bucket[:-1]) + 1])


def select(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The points that are drawn.

    Args:
        values: float64 [n]; NaN and infinities are values that are not finite.
        starts: As `bucket_starts` has them.

    Returns:
        int64 [at most 3 a bucket, and the last point], indices into `values`, ascending.
    """
    n = len(values)
    if n <= 2 * len(starts) and n and len(starts) == n:
        return np.arange(n)
    if not n:
        return np.zeros(0, np.int64)
    finite = np.isfinite(values)
    chosen = [np.asarray([n - 1])]  # a curve ends where the run is now
    if finite.all():
        low = high = values
    else:
        low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
        chosen.append(_first(~finite, starts, n))
    lengths = np.diff(np.append(starts, n))
    for extreme, array in ((np.minimum, low), (np.maximum, high)):
        chosen.append(_first((array == np.repeat(extreme.reduceat(array, starts), lengths)) & finite, starts, n))
    return np.unique(np.concatenate(chosen))


def _first(wanted: np.ndarray, starts: np.ndarray, n: int) -> np.ndarray:
    """The first index of each bucket where `wanted` is true; buckets without one are left out."""
    found = np.flatnonzero(wanted)
    if not len(found):
        return found
    bucket = np.searchsorted(starts, found, side="right")
    return found[np.concatenate([[True], bucket[1:] != bucket[:-1]])]


def bucket_means(values: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of the finite values of each bucket, and how many are not finite.

    Returns:
        float64 [buckets], NaN where none is finite; int64 [buckets].
    """
    finite = np.isfinite(values)
    small, scale = _scaled(values, finite)
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    lengths = np.diff(np.append(starts, len(values)))
    return _means(np.add.reduceat(small, starts), counts, scale), lengths - counts


def _scaled(values: np.ndarray, finite: np.ndarray) -> tuple[np.ndarray, float]:
    """The finite values, 0 for others, divided by a power of two with which their sums are finite; and that power."""
    kept = np.where(finite, values, 0.0)
    scale = 2.0 ** 60 if len(kept) and np.abs(kept).max() > 2.0 ** 960 else 1.0
    return (kept / scale if scale > 1 else kept), scale


def _means(sums: np.ndarray, counts: np.ndarray, scale: float) -> np.ndarray:
    """Means of scaled values, NaN where there is none."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.clip(sums / counts * scale, -_LARGEST, _LARGEST)  # rounded up, the mean of the largest would be infinite


def centred_mean(steps: np.ndarray, values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the finite values of `window` steps, each step in the middle of its own; of what there is at both ends.

    A trailing or an exponential mean would be late: it says that a loss which falls is larger than it is. By steps and not by
    values, so that a curve of few points, as of validation, is not smoothed flat.

    Args:
        steps: int64 [n], ascending.
        values: float64 [n].
        window: How many steps, at least 1.

    Returns:
        float64 [n]; NaN where the value itself is not finite, so that the curve has its gap there.

    Examples:
        >>> centred_mean(np.array([1, 2, 3, 4, 5]), np.array([1.0, 3.0, np.nan, 5.0, 9.0]), 3)
        array([ 2.,  2., nan,  7.,  7.])
    """
    finite = np.isfinite(values)
    if not finite.any():
        return np.full(len(values), np.nan)
    begin = np.searchsorted(steps, steps - window // 2)
    end = np.searchsorted(steps, steps + after(window), side="right")
    counts = np.concatenate([[0], np.cumsum(finite)])
    small, scale = _scaled(values, finite)
    return np.where(finite, _means(_window_sums(small, begin, end), counts[end] - counts[begin], scale), np.nan)


def _window_sums(values: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Sums of values[begin:end], none of them empty, each made of what is in it alone.

    The difference of two sums from the beginning on would lose, after one huge value, all that is small for ever. So sums
    begin anew at each block as long as the longest window: one that lies in two blocks is the end of the first and the
    beginning of the second, and one that lies in a block is added up.
    """
    longest = max(int((end - begin).max()), 1)
    blocks = -(-len(values) // longest)
    padded = np.zeros(blocks * longest)
    padded[:len(values)] = values
    table = padded.reshape(blocks, longest)
    from_begin = np.cumsum(table, 1).ravel()
    to_end = np.cumsum(table[:, ::-1], 1)[:, ::-1].ravel()
    last = end - 1
    sums = to_end[begin] + from_begin[last]
    inside = np.flatnonzero(begin // longest == last // longest)  # at the ends, and where steps are missing
    if len(inside):
        ends = np.stack([begin[inside], end[inside]], 1).ravel()
        sums[inside] = np.add.reduceat(np.append(values, 0.0), ends)[::2]
    return sums


def after(window: int) -> int:
    """How many of the steps of `centred_mean` come after the one in the middle."""
    return (window - 1) // 2
