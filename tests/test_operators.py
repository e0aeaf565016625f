"""The operators of the compiled graph: what the step adds runs on Ascend, GPU and CPU alike.

Tests have no accelerator, so they read what MindSpore documents: the graph after the passes that do not depend on the
device, and the section "Supported Platforms" of each primitive in it.
"""
import functools
import importlib
import re
import tempfile
from collections import Counter
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from instrument import AttentionProbe, Histogram, InstrumentedStep, attention, histograms, joining, shards
from instrument import stats as measure
from instrument.step import UNMEASURED
from instrument.taps import ALL_STATS, DEFAULT_STATS, ActivationStats, Taps
from networks import MLP, mlp_batches

pytestmark = pytest.mark.compiles

EVERYWHERE = {"Ascend", "GPU", "CPU"}

# Primitives of a compiled graph that no documentation speaks of, and why each is on every platform.
# Paths are those of MindSpore's sources, 2.0.0.
_STRUCTURE = "structure of a graph, executed by the runtime and by no kernel: core/ops/core_ops.h, kPrim{}"
UNDOCUMENTED = {
    **{name: _STRUCTURE.format(name) for name in ("Return", "MakeTuple", "TupleGetItem", "Switch", "Load", "UpdateState")},
    "TensorMove": "a copy that the compiler itself inserts where a parameter is read before it is written, in any network: "
                  "pipeline/jit/static_analysis/order_enforce.cc. Ascend: ops/_op_impl/tbe/tensor_move.py; GPU: "
                  "plugin/device/gpu/kernel/arrays/tensor_copy_gpu_kernel.h; CPU: this test runs it.",
}


def operators_of(cell, directory, *inputs):
    """How often each primitive stands in the compiled graph of `cell`, before the device has its say."""
    ms.set_context(save_graphs=True, save_graphs_path=str(directory))
    try:
        cell.compile(*inputs)
    finally:
        ms.set_context(save_graphs=False)
    # `validate` is the last pass of the front end in 2.0.0 to 2.10.0.
    (dump,) = directory.rglob("*_validate_*.ir")
    operators = Counter()
    for line in dump.read_text().splitlines():
        # "  %7(loss) = PrimFunc_Mul(%6, %2) ...", "  %9(x) = %8[@FuncUnion...](%1)" (a call), "  Return(%9)"
        if line.startswith(("  %", "  Return(")):
            statement = re.match(r"  (?:%\d+\(\S*?\) = )?(?:PrimFunc_)?(\w+|%\d+\S*?|@\S+?)\(", line)
            assert statement, f"a line of the graph that this test cannot read: {line}"
            if statement[1][0] not in "%@":
                operators[statement[1]] += 1
    return operators


def documented_platforms(name):
    """The platforms that MindSpore documents for the primitive, or None."""
    for module in ("ops.operations", "ops.auto_generate", "ops.operations._inner_ops"):
        try:
            primitive = getattr(importlib.import_module(f"mindspore.{module}"), name, None)
        except ImportError:  # auto_generate: 2.3 and later
            continue
        text = getattr(primitive, "__doc__", None) or ""
        # Generated classes only say "Refer to :func:`mindspore.ops.abs` for more details."
        for function in re.findall(r"Refer to :func:`mindspore\.ops\.(\w+)`", text):
            text += getattr(getattr(ops, function, None), "__doc__", None) or ""
        section = re.search(r"Supported Platforms:\s*\n(.*)", text)
        if section:
            return set(re.findall(r"\w+", section[1]))
    return None


def not_everywhere(operators):
    """Those of the primitives that are not documented for every platform, with what is documented (None for nothing)."""
    platforms = {name: documented_platforms(name) for name in operators if name not in UNDOCUMENTED}
    return {name: found for name, found in platforms.items() if found is None or not found >= EVERYWHERE}


def mlp_batch():
    return [Tensor(array) for array in mlp_batches(1)[0]]


def of_the_stock_step(directory):
    """The operators of `nn.TrainOneStepCell`."""
    network = MLP()
    step = nn.TrainOneStepCell(network, nn.Momentum(network.trainable_params(), 0.1, 0.9)).set_train()
    return operators_of(step, directory, *mlp_batch())


class Deciding(InstrumentedStep):
    """As in another compiled cell, where the graph decides which steps it measures."""

    def decide_in_graph(self, yes):
        super().decide_in_graph(True)


class Together(InstrumentedStep):
    """As on rank 1 of four of a data parallel job. Only a job can compile an AllReduce; see `of_everything`."""

    def _choose_joining(self, scope, ranks):
        self.reducer_flag = self.mean = True
        super()._choose_joining(scope, ranks)


ALL = dict(loss_scale=nn.DynamicLossScaleUpdateCell(1024, 2, 100), max_grad_norm=1.0, accumulate=2, activations="leaves",
           activation_stats=ALL_STATS, activation_gradients=True, counts=True, updates=True, moments=True, window=4,
           spike_window=4, histograms=[Histogram("weight", "weight", every=6), Histogram("gradient", "bias", every=3),
                                       Histogram("activation", "act", every=3)])
WITH_SHARDS = dict(activations="leaves", activation_stats=ALL_STATS, activation_gradients=True, window=4, spike_window=4,
                   allow_unverified=True)  # all else is refused there
EVERYTHING = {"on a CPU": (InstrumentedStep, "CPU", ALL), "on Ascend": (InstrumentedStep, "Ascend", ALL),
              "in another cell": (Deciding, "Ascend", {**ALL, "every": 3}),
              "of four ranks": (Together, "Ascend", {**ALL, "ranks": True}),
              "of shards": (InstrumentedStep, "Ascend", WITH_SHARDS)}
STAND_IN = "Erf"  # for the AllReduce: takes one float32 tensor, and nothing else here uses it


def of_everything(which, directory):
    """The operators of the step with everything on, where it believes itself on a CPU and where on an accelerator: it takes
    other reductions there."""
    kind, target, options = EVERYTHING[which]
    network = MLP()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("instrument._compat.device_target", lambda: target)
        if which in ("of four ranks", "of shards"):
            patch.setattr(ops, "AllReduce", getattr(ops, STAND_IN))
            patch.setattr("instrument.controls.get_group_size", lambda: 4)
            patch.setattr("instrument.step.get_rank", lambda: 1)
        if which == "of shards":
            patch.setattr("instrument._compat.sharded_by", lambda: "the parallel mode 'semi_auto_parallel'")
            patch.setattr("instrument.scopes.tell", lambda *_, **__: None)
        step = kind(network, nn.Momentum(network.trainable_params(), 0.1, 0.9), **options).set_train()
        step.decide_in_graph("every" in options)
        operators = operators_of(step, directory, *mlp_batch())
    operators["AllReduce"] = operators.pop(STAND_IN, 0)
    return +operators


def of_attention(on, every, target, directory):
    """The operators of a step around attention, which measures it or not."""
    network = Attentive()
    inputs = Tensor(np.ones((4, 4, 8)), ms.float32), Tensor(np.zeros((4, 4)), ms.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("instrument._compat.device_target", lambda: target)
        step = InstrumentedStep(network, nn.Momentum(network.trainable_params(), 0.1, 0.9), activations=None, attention=on,
                                every=every).set_train()
        step.decide_in_graph(every > 1)
        return operators_of(step, directory, *inputs)


@functools.lru_cache(None)
def added_by(which):
    """What the step with everything on adds to the stock step; "by attention": what measuring attention adds to a step."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if which == "the stock step":
            return of_the_stock_step(directory)
        if which == "by attention":
            on, off = (of_attention(on, 1, "CPU", directory / str(on)) for on in (True, False))
            in_condition, without = (of_attention(on, 3, "Ascend", directory / f"{on} 3") for on in (True, False))
            return (on - off) | (in_condition - without)
        return of_everything(which, directory) - added_by("the stock step")


COLUMNS = (*EVERYTHING, "by attention")


def table():
    """benchmarks/results/operators.md: the text of what these tests look at."""
    found = {which: added_by(which) for which in COLUMNS}
    lines = [f"Primitives that measuring adds to the graph of the stock step (MindSpore {ms.__version__}), and the platforms",
             "that are documented for each: of a step with everything on, where it believes itself on a CPU, on Ascend, in",
             "another compiled cell, one of four ranks of a data parallel job, and a rank with shards (where some options are",
             "refused); and of a step that measures attention, beside the same step without. tests/test_operators.py holds",
             "this table to the graphs.", "",
             f"| primitive | {' | '.join(COLUMNS)} | platforms |", f"|---|{'---|' * len(COLUMNS)}---|"]
    for name in sorted(set().union(*found.values())):
        platforms = documented_platforms(name)
        said = ", ".join(each for each in ("Ascend", "GPU", "CPU") if platforms and each in platforms) or "undocumented"
        if name in UNDOCUMENTED:
            said = ("undocumented; kernels on Ascend, GPU and CPU" if name == "TensorMove"
                    else "structure of a graph, not a kernel")
        lines.append(f"| `{name}` | {' | '.join(str(each[name]) for each in found.values())} | {said} |")
    missing = not_everywhere(sum(found.values(), Counter()))
    return "\n".join([*lines, "", f"Not on every platform: {', '.join(missing) or 'none'}.", ""])


@pytest.fixture(scope="module")
def batch():
    return mlp_batch()


@pytest.fixture(scope="module")
def plain():
    return added_by("the stock step")


@pytest.mark.parametrize("which", EVERYTHING)
def test_the_graphs_are_read(plain, which):
    added = added_by(which)
    assert plain["ApplyMomentum"] == 4 and added["ApplyMomentum"] % 4 == 0  # once a branch
    assert added["ReduceSum"] > 10 and added["IsFinite"] > 0 and added["ReduceMax"] > 0
    # Two weights, two gradients, one activation.
    assert added["Bucketize"] == added["Bincount"] == (0 if which == "of shards" else 5)
    assert (added["AllReduce"] > 0) == (which in ("of four ranks", "of shards"))


@pytest.mark.parametrize("which", COLUMNS)
def test_every_operator_that_the_step_adds_is_documented_for_every_platform(which):
    assert not_everywhere(added_by(which)) == {}


def test_the_table_has_the_operators_of_the_graphs():
    committed = (Path(__file__).parents[1] / "benchmarks" / "results" / "operators.md").read_text("utf-8")
    if f"(MindSpore {ms.__version__})" not in committed:
        pytest.skip("the table is of another release, whose graphs have other operators")
    assert committed == table(), "python benchmarks/operators.py > benchmarks/results/operators.md"


def test_a_step_that_is_not_measured_computes_what_the_stock_step_does_and_counts(tmp_path, batch, plain):
    network = MLP()
    step = InstrumentedStep(network, nn.Momentum(network.trainable_params(), 0.1, 0.9), every=10, activations="leaves",
                            activation_gradients=True, counts=True, updates=True, moments=True, spike_window=4).set_train()
    step.measuring = False
    step.phase += UNMEASURED
    operators = operators_of(step, tmp_path, *batch)
    assert not plain - operators
    order = {"Depend", "Load", "UpdateState", "MakeTuple"}
    # Of the step's number, and of the loss, which is brought into a vector: each of one element.
    assert {name: n for name, n in (operators - plain).items() if name not in order} \
        == {"Add": 1, "Assign": 1, "Concat": 1, "Reshape": 1}


def test_every_primitive_of_the_mathematics_is_documented_for_every_platform():
    """Those of paths that the graphs above do not take, such as sparse gradients, as well."""
    # `constexpr` makes a local subclass of Primitive: such a function runs while the graph is compiled.
    primitives = {value.name for module in (measure, attention, histograms, joining, shards) for value in vars(module).values()
                  if isinstance(value, ops.Primitive) and "<locals>" not in type(value).__qualname__}
    assert len(primitives) > 10
    assert not_everywhere(primitives) == {}


def test_the_table_of_exceptions_has_no_needless_entry():
    assert {name: documented_platforms(name) for name in UNDOCUMENTED} == dict.fromkeys(UNDOCUMENTED)


class OnCPUOnly(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fmax = ops.Fmax()

    def construct(self, x, y):
        return self.fmax(x, y) + y


def test_an_operator_for_cpus_only_is_caught(tmp_path):
    operators = operators_of(OnCPUOnly(), tmp_path, Tensor([1.0, 2.0]), Tensor([2.0, 1.0]))
    assert operators["Fmax"] == operators["Add"] == 1
    assert not_everywhere(operators) == {"Fmax": {"CPU"}}


def test_an_unknown_operator_is_caught():
    assert not_everywhere(Counter(["Add", "NoSuchPrimitive"])) == {"NoSuchPrimitive": None}


class Alone(nn.Cell):
    """The statistics' last stage with the slots' gradients as inputs, so that nothing is a constant."""

    def __init__(self, activation_stats):
        super().__init__(auto_prefix=False)
        self.activation_stats = activation_stats

    def construct(self, scale, *carried):
        return self.activation_stats(carried, scale)


class Owner:
    """Stands for the step."""

    def owns(self, cell):
        return True


def operators_for_taps(number, directory):
    owner = Owner()
    chosen = [(f"cell{i}", nn.ReLU()) for i in range(number)]
    # cells differ in what is measured of them
    statistics = [DEFAULT_STATS if i % 2 else ALL_STATS for i in range(number)]
    taps = Taps(chosen, statistics, True, owner)
    carried = [Tensor(np.ones(tap.slot.shape, np.float32)) for tap in taps.taps]
    return operators_of(Alone(ActivationStats(taps, scaled=True)), directory, Tensor(2.0, ms.float32), *carried)


def test_the_operators_of_activation_statistics_do_not_grow_with_the_number_of_taps(tmp_path):
    one, seven = (operators_for_taps(number, tmp_path / str(number)) for number in (1, 7))
    assert one["Concat"] == 1 and one["Gather"] > 0
    assert one == seven


class Attentive(nn.Cell):
    """MindSpore's attention with everything on, and both kinds of probe."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)
        self.scores, self.probabilities = AttentionProbe(), AttentionProbe("probabilities")
        self.softmax = nn.Softmax()

    def construct(self, x, mask):
        y = self.layer(x, x, x, attn_mask=mask, key_padding_mask=mask)[0]
        return ops.ReduceMean()(self.probabilities(self.softmax(self.scores(y))))


class Counts(nn.Cell):
    def construct(self, x):
        return histograms.carried(histograms.log2_counts(x))


def test_counting_magnitudes_reads_the_tensor_at_most_three_times(tmp_path):
    """Of all operators these take the tensor, or what has its size; a reshape copies nothing. The others take the counts."""
    operators = operators_of(Counts(), tmp_path, Tensor(np.ones((64, 50), np.float32)))
    whole = {"Bucketize": 1, "Bincount": 1, "Reshape": 1}
    of_counts = {"Slice", "MakeTuple", "Concat", "Add", "FloorDiv", "Mul", "Sub", "Cast", "Return"}  # one Cast: of the counts
    assert {name: n for name, n in operators.items() if name not in of_counts} == whole and operators["Cast"] == 1


def test_attention_is_in_the_graphs():
    added = added_by("by attention")
    assert added["Exp"] == 2 and added["BatchMatMul"] == 1 and added["Log"] == 3  # both layers of scores; and probabilities
