"""Everything that depends on which MindSpore this is; no other module asks.

Each entry says which releases need it and when it can go.
"""
from __future__ import annotations

import functools
import os
import warnings

import mindspore as ms
from mindspore import nn, ops
from packaging.version import Version

TESTED = ("2.0.0", "2.7.0", "2.7.1", "2.7.2", "2.8.0", "2.9.0", "2.10.0")

RELEASE = Version(ms.__version__.split("+")[0])

# ops.constexpr became public with 2.0; the decorator runs a function while the graph is compiled.
constexpr = ops.constexpr

# ms.bfloat16 as a type of CPU kernels: 2.2 and later.
BFLOAT16 = getattr(ms, "bfloat16", None)
FLOAT_TYPES = tuple(t for t in (ms.float16, ms.float32, ms.float64, BFLOAT16) if t is not None)


@functools.cache
def warn_if_untested(release: str = str(RELEASE)) -> None:
    """Warn, once a process, about a MindSpore release that no test of ours has seen."""
    if release not in TESTED:
        warnings.warn(f"instrument has not been tested with MindSpore {release}; tested: {', '.join(TESTED)}. "
                      "If a number looks wrong, compare with one of those.", stacklevel=3)


def device_target() -> str:
    """`"Ascend"`, `"GPU"` or `"CPU"`."""
    return ms.get_context("device_target")


def is_graph_mode() -> bool:
    """Whether a cell called now is compiled."""
    return ms.get_context("mode") == ms.GRAPH_MODE


def check_parallel_mode() -> None:
    """ValueError in a parallel mode in which a tensor of this rank is a shard, so that its norm would be one as well."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    if mode not in ("stand_alone", "data_parallel"):
        raise ValueError(f"InstrumentedStep measures the tensors of this rank, which in the parallel mode {mode!r} can be "
                         "shards: the norms would be wrong. It works in 'stand_alone' and 'data_parallel'.")
    if ms.get_auto_parallel_context("enable_parallel_optimizer"):
        raise ValueError("InstrumentedStep measures the tensors of this rank, which with enable_parallel_optimizer=True are "
                         "shards: the norms would be wrong. Switch it off.")


def check_overflow_is_visible() -> None:
    """ValueError where an overflow does not show in the gradients."""
    if device_target() == "Ascend" and os.environ.get("MS_ASCEND_CHECK_OVERFLOW_MODE") == "SATURATION_MODE":
        raise ValueError("loss scaling finds an overflow by looking at the gradients, but in SATURATION_MODE the device "
                         "writes 65504 in place of infinity. Set the environment variable "
                         "MS_ASCEND_CHECK_OVERFLOW_MODE=INFNAN_MODE, or use no loss_scale.")


def is_recomputed(cell: nn.Cell) -> bool:
    """Whether this cell, or a cell around it, had `recompute()` called."""
    return bool(getattr(cell, "_has_config_recompute", False))  # set on the cell and all below it, 2.0.0 to 2.10.0


# PyNative mode of 2.1 and later hangs its recomputation below the cell, as a child of this name.
RECOMPUTE_CELL = "_recompute_cell"


def named_cells(network: nn.Cell) -> list[tuple[str, nn.Cell]]:
    """`cells_and_names()` without the network itself and what MindSpore hangs there."""
    return [(name, cell) for name, cell in network.cells_and_names() if name and not name.endswith(RECOMPUTE_CELL)]


def children(cell: nn.Cell) -> list[nn.Cell]:
    """The cells right below this one, without what MindSpore itself hangs there."""
    return [child for name, child in cell.name_cells().items() if name != RECOMPUTE_CELL]


def has_custom_bprop(cell: nn.Cell) -> bool:
    """Whether the cell's class gives its own gradient."""
    return hasattr(type(cell), "bprop")


def abandon_gradient() -> None:
    """Leave the gradient that an exception has cut short in PyNative mode.

    From 2.7 on MindSpore would stay in it, and record whatever runs next; compiled functions with a gradient of their own
    then fail on 2.10. Releases without the executor's `clear_res` need none.
    """
    try:
        from mindspore.common.api import _pynative_executor

        _pynative_executor.clear_res()
    except Exception:  # an internal of MindSpore; the exception that led here is the one to see
        pass


# Operators whose kernels have a random stream, by parts of their names.
_RANDOM = (b"Dropout", b"Random", b"Uniform", b"Normal", b"Multinomial", b"Bernoulli", b"Poisson", b"Gamma", b"Laplace")


def draws_random_numbers(cell: nn.Cell) -> bool:
    """Whether the graph that was compiled last for this cell has an operator that draws random numbers.

    True where the release does not tell. A name that only looks like such an operator counts as one.
    """
    try:
        from mindspore.common.api import _cell_graph_executor

        graphs = [_cell_graph_executor._get_func_graph_proto(cell, phase, "mind_ir") for phase in cell.compile_cache]
    except Exception:  # an internal of MindSpore
        return True
    return not graphs or any(name in graph for graph in graphs for name in _RANDOM)
