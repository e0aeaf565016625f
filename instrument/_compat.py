"""Everything that depends on which MindSpore this is; no other module asks.

Each entry says which releases need it and when it can go.
"""
from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from typing import NoReturn

import mindspore as ms
from mindspore import nn, ops
from packaging.version import Version

from instrument.supported import PYTHONS

TESTED = tuple(PYTHONS)

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


def sharded_by() -> str:
    """The setting by which tensors of this rank are shards, or can be; empty where none is.

    `AutoParallel` sets it only while it compiles what it wraps.
    """
    mode = ms.get_auto_parallel_context("parallel_mode")
    if mode not in ("stand_alone", "data_parallel"):
        return f"the parallel mode {mode!r}"
    return "enable_parallel_optimizer=True" if ms.get_auto_parallel_context("enable_parallel_optimizer") else ""


# mindspore.parallel.auto_parallel.AutoParallel, a cell that is put around a whole training step: 2.5 and later.
HAS_AUTO_PARALLEL = importlib.util.find_spec("mindspore.parallel.auto_parallel") is not None


def sharded_here(allow_unverified: bool) -> str:
    """As `sharded_by`, for a step that is being made; by `AutoParallel` where nothing else can be meant by allowing it."""
    setting = sharded_by()
    if not setting and allow_unverified and HAS_AUTO_PARALLEL and trains_alone():
        setting = "AutoParallel"
    return setting


def auto_parallel_around(network: nn.Cell) -> bool:
    """Whether a train network is an `AutoParallel` for more than one device."""
    return type(network).__name__ == "AutoParallel" and getattr(network, "_device_num", 2) > 1


def refuse_shards(setting: str) -> NoReturn:
    """ValueError that says why nothing is measured under this setting, by which tensors of this rank are shards."""
    raise ValueError(f"with {setting} tensors of this rank can be shards. InstrumentedStep works in 'stand_alone' and "
                     "'data_parallel' without the optimizer parallel; what it measures elsewhere could not be verified, since "
                     "no machine was at hand that runs it. allow_unverified=True measures all the same, and marks each metric "
                     'so (README, "Several ranks").')


def check_layout(for_shards: bool, joined: bool) -> None:
    """ValueError where a graph that was made for whole tensors is compiled for shards, or the other way round."""
    setting = sharded_by()
    if setting and not for_shards:
        raise ValueError(f"this step was made for whole tensors, and is compiled with {setting}, where a rank holds shards: "
                         "its norms would be wrong. Give InstrumentedStep, NormStats or StepOptions allow_unverified=True, "
                         'which measures shards, and marks each metric so (README, "Several ranks").')
    if for_shards and not setting and trains_alone():
        raise ValueError("with allow_unverified=True this step was made for shards, and here each process trains by itself: "
                         "its norms would be those of all of them together. Leave out allow_unverified, or put "
                         "AutoParallel around the step, or set the parallel mode before it is made.")
    if joined and setting and pipeline_stage()[1] > 1:
        raise ValueError("this step was made to add up its sums over all ranks, and is compiled for one stage of a pipeline, "
                         "which has parameters of its own: ranks would wait for each other for ever. Set pipeline_stages by "
                         "set_auto_parallel_context before the step is made, or measure nothing.")


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


# 2.0.0 merges the graphs of cells that were made with equal arguments (nn.Dense with an activation), whatever class the cells
# inside them have been given since: all of them then call those inside one. Not so from 2.7 on.
MERGES_LIKE_CELLS = RELEASE < Version("2.7")


def keep_apart(network: nn.Cell, tapped: list[nn.Cell]) -> list[tuple[nn.Cell, str]]:
    """Keep the compiler from merging cells that have a tapped one inside; returns them with what they had before."""
    if not MERGES_LIKE_CELLS:
        return []
    inside = {id(cell) for cell in tapped}
    names = [name for name, cell in network.cells_and_names() if id(cell) in inside]
    around = [(name, cell) for name, cell in network.cells_and_names()
              if getattr(cell, "cell_init_args", "") and any(each.startswith(f"{name}.") for each in names)]
    before = [(cell, cell.cell_init_args) for _, cell in around]
    for name, cell in around:
        cell.cell_init_args += f"@{name}"
    return before


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


def device_memory() -> dict[str, float]:
    """Bytes of MindSpore's memory pool on the device: `device/memory` now, `device/memory_peak` up to now.

    Empty on a CPU, which has none, and on releases that do not tell (before 2.4).
    """
    if device_target() == "CPU":
        return {}
    calls = {"device/memory": "memory_allocated", "device/memory_peak": "max_memory_allocated"}
    for module in (getattr(ms, "runtime", None), getattr(ms, "hal", None)):  # 2.5 and later, 2.4
        if all(hasattr(module, call) for call in calls.values()):
            return {name: float(getattr(module, call)()) for name, call in calls.items()}
    return {}


def device_id() -> int:
    """Number of this process's device among those that it sees."""
    return int(ms.get_context("device_id"))


def rank_and_size() -> tuple[int, int]:
    """This process's rank, and how many there are: as the launcher says, or (0, 1)."""
    try:
        from mindspore.communication import get_group_size, get_rank

        return int(get_rank()), int(get_group_size())
    except Exception:  # no communication has been begun; each release raises another class
        found = [os.environ.get(name, "") for name in ("RANK_ID", "RANK_SIZE")]
        return (int(found[0]), int(found[1])) if all(map(str.isdecimal, found)) else (0, 1)


def trains_alone() -> bool:
    """Whether this is one of several processes, and nothing reduces their gradients: each trains by itself."""
    return ms.get_auto_parallel_context("parallel_mode") == "stand_alone" and rank_and_size()[1] > 1


def pipeline_stage() -> tuple[int, int]:
    """This process's pipeline stage, and how many there are."""
    stages = int(ms.get_auto_parallel_context("pipeline_stages") or 1)
    rank, ranks = rank_and_size()
    return rank // max(ranks // stages, 1), stages


def has_loss() -> bool:
    """Whether this process's pipeline stage is the one that knows the loss; on the others a step returns another number."""
    stage, stages = pipeline_stage()
    try:
        is_v = ms.get_auto_parallel_context("pipeline_scheduler") == "zero_bubble_v"  # which comes back to the first stage
    except ValueError:  # no such setting yet: 2.0.0
        is_v = False
    return stage == (0 if is_v else stages - 1)


def stages_of(network: nn.Cell) -> dict[str, int | None]:
    """The pipeline stage of each cell by its name, or of the nearest cell around it; None where none says."""
    stages: dict[str, int | None] = {}
    for name, cell in network.cells_and_names():  # a cell comes after those around it
        stage = getattr(cell, "pipeline_stage", None)
        is_said = isinstance(stage, int) and stage >= 0  # -1: not said
        stages[name] = stage if is_said else stages.get(name.rpartition(".")[0])
    return stages


def job() -> str:
    """What the processes of one parallel job have in common, by their launcher's settings."""
    names = ("MS_SCHED_HOST", "MS_SCHED_PORT", "RANK_TABLE_FILE", "MS_JOB_ID")
    return " ".join(os.environ[name] for name in names if os.environ.get(name)) or "job"
