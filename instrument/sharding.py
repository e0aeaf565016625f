"""Norms of a model whose parameters are shards: the arithmetic on the host, of semi-automatic and optimizer parallel.

Owns one formula, and measures nothing. `InstrumentedStep` refuses these modes, because no machine was there to hold the whole
way against one device; with these functions a user can go it and check it. The way is: on each rank one float32 vector s of
the sums of squares of the local shards, of gradients and weights; one AllReduce(SUM) of it over all n ranks, and no other
operation on the same tensor, since MindSpore's compiler merges such AllReduces; then, on the host, what is here.

A parameter that k ranks hold one and the same shard of is counted k times in that sum. With global size N and local size M,
N / M shards make the parameter, so that r = n M / N ranks hold each. Sizes say all that there is to know of the layout, as
long as all shards of a parameter have one size, which is how MindSpore cuts.
"""
from __future__ import annotations

from typing import Any

import numpy as np


def replication(local_sizes: Any, global_sizes: Any, ranks: int) -> np.ndarray:
    """How many ranks hold each shard of each parameter: r = n * local size / global size.

    Args:
        local_sizes: Elements of each parameter on this rank, whole numbers [P].
        global_sizes: Elements of the whole parameters, as noted before the graph is compiled, [P].
        ranks: n, the number of processes in the AllReduce.

    Returns:
        int64 [P], from 1 (sharded over all ranks) to n (the same on each).

    Raises:
        ValueError: Sizes and number of ranks do not fit: a shard is no whole part, or parts and ranks do not divide.

    Example:
        >>> replication([8, 2, 4], [8, 8, 8], ranks=4)
        array([4, 1, 2])
    """
    local, whole = np.asarray(local_sizes, np.int64), np.asarray(global_sizes, np.int64)
    if local.shape != whole.shape or local.ndim != 1:
        raise ValueError(f"`local_sizes` and `global_sizes` must have one number a parameter, but their shapes are "
                         f"{local.shape} and {whole.shape}.")
    if ranks < 1:
        raise ValueError(f"`ranks` must be a number of processes from 1, but it is {ranks!r}.")
    for position, (part, size) in enumerate(zip(local.tolist(), whole.tolist())):
        if part < 1 or size % part or ranks % (size // part):
            raise ValueError(f"parameter {position} of {size} elements has {part} on this rank, which cannot be on {ranks} "
                             "ranks: the shards of a parameter must be of one size, and each on the same number of ranks. "
                             "Note `global_sizes` before the graph is compiled, and take all ranks of the AllReduce.")
    return ranks * local // whole


def norms(square_sums: Any, local_sizes: Any, global_sizes: Any, ranks: int) -> tuple[np.ndarray, float]:
    """Norms of whole parameters from the AllReduce of the sums of squares of their shards.

    norm_p = sqrt(s_p / r_p), and of all sqrt(Σ s_p / r_p), with r of `replication`, in float64.

    Args:
        square_sums: s, the sum over all ranks of the sums of squares of local shards, [P]. NaN and infinities stay.
        local_sizes: As for `replication`; likewise `global_sizes` and `ranks`.

    Returns:
        (norms, norm): float64 [P], and that of all parameters together.

    Raises:
        ValueError: As for `replication`; or there is not one sum a parameter.

    Example:
        >>> norms([4 * 9.0, 16.0], [8, 2], [8, 8], ranks=4)       # the first one is on each of four ranks
        (array([3., 4.]), 5.0)
    """
    sums = np.asarray(square_sums, np.float64)
    parts = replication(local_sizes, global_sizes, ranks)
    if sums.shape != parts.shape:
        raise ValueError(f"`square_sums` must have one number a parameter, {len(parts)}, but its shape is {sums.shape}.")
    squares = sums / parts
    return np.sqrt(squares), float(np.sqrt(squares.sum()))
