"""Taps on every kind of cell: what they measure, and what they refuse."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import reference
from instrument import InstrumentedStep
from instrument.taps import ALL_STATS

# float32 carries 1.2e-7 a rounding; sums of these few elements are tens of roundings deep.
TOLERANCE = 2e-6

X = np.random.default_rng(5).normal(size=(4, 8)).astype(np.float32)


class Linear(nn.Cell):
    """x @ w, w fixed by a seed."""

    def __init__(self, seed=0, width=8):
        super().__init__()
        self.w = Parameter(Tensor(np.random.default_rng(seed).normal(0, 0.4, (width, width)).astype(np.float32)), name="w")

    def construct(self, x):
        return ops.matmul(x, ops.cast(self.w, x.dtype))  # as nn.Dense does: to_float casts inputs, not parameters


class Loss(nn.Cell):
    """Mean of squares of what `body` returns."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def construct(self, x):
        return ops.ReduceMean()(ops.square(self.body(x)))


def run(network, x=X, steps=3, **options):
    """Values of the last of some steps with learning rate 0: every step must say the same."""
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), **{"activations": [r"."], **options})
    rows = [step.schema.unpack(step(Tensor(x))[1]) for _ in range(steps)]
    assert all({**row, "step": 0} == pytest.approx({**rows[0], "step": 0}, nan_ok=True) for row in rows)
    return rows[-1]


def check(values, cell, output, tolerance=TOLERANCE, count=1):
    expected = reference.activation(output)
    for stat in ("mean", "rms", "absmax", "nonfinite"):
        scale = expected["rms"] if stat == "mean" else abs(expected[stat])
        assert abs(values[f"activation/{stat}/{cell}"] - expected[stat]) <= tolerance * scale, (stat, cell)
    assert values[f"activation/count/{cell}"] == count


# ---- cells reached in any way

class Reached(nn.Cell):
    def __init__(self, how):
        super().__init__()
        layers = [Linear(i) for i in range(2)]
        self.how = how
        if how == "attribute":
            self.a, self.b = layers
        elif how == "cell list":
            self.layers = nn.CellList(layers)
        elif how == "sequential":
            self.layers = nn.SequentialCell(layers)
        else:
            self.a, self.b = layers
            self.layers = (self.a, self.b)

    def construct(self, x):
        if self.how == "attribute":
            return self.b(self.a(x))
        if self.how == "sequential":
            return self.layers(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("how", ["attribute", "cell list", "sequential", "tuple"])
def test_a_cell_is_measured_however_it_is_reached(mode, how):
    network = Loss(Reached(how))
    values = run(network, activations=[Linear])
    w = [p.asnumpy() for p in network.trainable_params()]
    names = [name for name, cell in network.cells_and_names() if isinstance(cell, Linear)]
    first = X @ w[0]
    check(values, names[0], first)
    check(values, names[1], first @ w[1])


# ---- called several times, with keywords, through super()

class Twice(nn.Cell):
    def __init__(self):
        super().__init__()
        self.shared = Linear()

    def construct(self, x):
        return self.shared(self.shared(x))


def test_a_cell_called_twice_counts_two_and_merges(mode):
    network = Loss(Twice())
    values = run(network, activations=[Linear], counts=True)
    w = network.trainable_params()[0].asnumpy()
    outputs = np.stack([X @ w, X @ w @ w])
    name = "body.shared"
    assert values[f"activation/count/{name}"] == 2
    assert values[f"activation/rms/{name}"] == pytest.approx(reference.activation(outputs)["rms"], rel=TOLERANCE)
    assert values[f"activation/mean/{name}"] == pytest.approx(outputs.mean(dtype=np.float64), abs=1e-6)
    # documented: a sum over calls cannot tell the largest, so it is the mean of the maxima
    assert values[f"activation/absmax/{name}"] == pytest.approx(np.abs(outputs).max((1, 2)).mean(), rel=TOLERANCE)
    assert values[f"activation/zero_fraction/{name}"] == 0


class WithKeywords(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner = Scale()

    def construct(self, x):
        return self.inner(x, factor=3.0) + self.inner(x) + self.inner(x, 2.0)


class Scale(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.ones(8, np.float32)), name="w")

    def construct(self, x, factor=1.0):
        return x * self.w * factor


def test_keyword_and_default_arguments_arrive(mode):
    values = run(Loss(WithKeywords()), activations=[Scale])
    outputs = np.stack([X * 3, X, X * 2])
    assert values["activation/count/body.inner"] == 3
    assert values["activation/rms/body.inner"] == pytest.approx(reference.activation(outputs)["rms"], rel=TOLERANCE)


class Derived(Linear):
    def construct(self, x):
        return super().construct(x) + x


def test_a_construct_that_calls_super_is_measured_or_refused(mode):
    network = Loss(Derived())
    values = run(network)
    check(values, "body", X @ network.trainable_params()[0].asnumpy() + X)


# ---- outputs that are no single float tensor

class TupleOutput(Linear):
    def construct(self, x):
        y = ops.matmul(x, self.w)
        return ops.argmax(y, -1), y, y * 2


class UsesTuple(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner = TupleOutput()

    def construct(self, x):
        index, y, double = self.inner(x)
        return y + double + ops.cast(ops.expand_dims(index, -1), ms.float32)


def test_of_a_tuple_the_first_float_tensor_is_measured(mode):
    network = Loss(UsesTuple())
    values = run(network, activations=[TupleOutput])
    check(values, "body.inner", X @ network.trainable_params()[0].asnumpy())


class DictOutput(Linear):
    def construct(self, x):
        y = ops.matmul(x, self.w)
        return {"index": ops.argmax(y, -1), "hidden": y}


class UsesDict(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner = DictOutput()

    def construct(self, x):
        return self.inner(x)["hidden"]


def test_of_a_dict_the_first_float_tensor_is_measured(mode):
    network = Loss(UsesDict())
    values = run(network, activations=[DictOutput])
    check(values, "body.inner", X @ network.trainable_params()[0].asnumpy())


class Index(nn.Cell):
    def construct(self, x):
        return ops.argmax(x, -1)


class UsesIndex(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner = Linear()
        self.index = Index()

    def construct(self, x):
        y = self.inner(x)
        return y * ops.cast(ops.expand_dims(self.index(y), -1), ms.float32)


def test_an_integer_output_is_refused_by_name_and_the_network_goes_on(mode):
    network = Loss(UsesIndex())
    expected = network(Tensor(X)).asnumpy()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=[Index])
    with pytest.raises(TypeError, match=r"body\.index.*no float tensor"):
        step(Tensor(X))
    step.remove_taps()
    assert type(network.body.index) is Index
    loss, _ = step(Tensor(X))
    assert np.allclose(loss.asnumpy(), expected, rtol=1e-6)


# ---- gradients of their own, recomputation, precision

class OwnGradient(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.ones(8, np.float32)), name="w")

    def construct(self, x):
        return x * 2

    def bprop(self, x, out, dout):
        return (dout * 5,)


class AroundOwnGradient(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first = Linear()
        self.inner = OwnGradient()

    def construct(self, x):
        return self.inner(self.first(x))


def test_a_cell_with_its_own_gradient_is_refused_and_keeps_it(mode):
    network = Loss(AroundOwnGradient())
    with pytest.raises(ValueError, match=r"body\.inner.*bprop"):
        InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=[OwnGradient])
    values = run(network, activations=[r"^body$", "first"], activation_gradients=True)
    w = network.body.first.w.asnumpy()
    output = 2 * (X @ w)
    check(values, "body", output)
    d_first = 5 * 2 * output / output.size  # the cell's own gradient is 5, not 2
    assert values["activation_grad/rms/body.first"] == pytest.approx(reference.activation(d_first)["rms"], rel=TOLERANCE)


class Recomputed(nn.Cell):
    def __init__(self, where):
        super().__init__()
        self.block = nn.SequentialCell(Linear(0), Linear(1))
        self.last = Linear(2)
        if where == "block":
            self.block.recompute()
        elif where == "cell":
            self.block[1].recompute()

    def construct(self, x):
        return self.last(self.block(x))


@pytest.mark.parametrize("where", ["block", "cell"])
def test_recomputed_cells_are_measured_once_in_graph_mode_and_refused_in_pynative(mode, where):
    if mode == "pynative" and ms.__version__ == "2.0.0":
        pytest.skip("MindSpore 2.0.0 refuses recompute in PyNative mode")
    network = Loss(Recomputed(where))
    w = [p.asnumpy() for p in network.trainable_params()]
    inside = [r"block\.1$"] if where == "cell" else [r"block$", r"block\.0$", r"block\.1$"]
    if mode == "pynative":
        for expression in inside:
            with pytest.raises(ValueError, match=r"body\.block.*PyNative"):
                InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=[expression])
        with pytest.warns(UserWarning, match="are not measured.*PyNative"):
            values = run(network, activations="leaves")
        assert not [name for name in values if name.endswith("block.1")]
        check(values, "body.last", X @ w[0] @ w[1] @ w[2])
        return
    values = run(network, activations=[*inside, "last"])
    check(values, "body.block.1", X @ w[0] @ w[1])
    if where == "block":
        check(values, "body.block.0", X @ w[0])
        check(values, "body.block", X @ w[0] @ w[1])


class Large(nn.Cell):
    """Outputs near 300: their sum of squares overflows float16, their mean of squares too."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.full((8, 256), 100, np.float32)), name="w")

    def construct(self, x):
        return ops.matmul(x, ops.cast(self.w, x.dtype))


class MeanLoss(nn.Cell):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def construct(self, x):
        return ops.ReduceMean()(ops.cast(self.body(x), ms.float32))


@pytest.mark.parametrize("where", ["cell", "network"])
def test_cells_under_to_float_carry_float32_statistics(mode, where):
    network = MeanLoss(Large())
    (network.body if where == "cell" else network).to_float(ms.float16)
    x = np.full((4, 8), 0.375, np.float32)
    values = run(network, x=x, activations=[Large], activation_gradients=True, activation_stats=ALL_STATS)
    output = np.full((4, 256), 300.0)
    check(values, "body", output, tolerance=1e-6)
    assert values["activation_grad/rms/body"] == pytest.approx(float(np.float16(1 / output.size)), rel=1e-3)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_automatic_mixed_precision(mode, level):
    network = ms.amp.auto_mixed_precision(Loss(nn.SequentialCell(Linear(0), Linear(1))), level)
    values = run(network, activations="leaves")
    names = [name.split("/", 2)[2] for name in values if name.startswith("activation/count/")]
    w = [p.asnumpy().astype(np.float64) for p in network.trainable_params()]
    # half precision carries 1e-3 a rounding
    check(values, names[0], X @ w[0], tolerance=5e-3)
    check(values, names[1], X @ w[0] @ w[1], tolerance=5e-3)


# ---- what does not reach the loss

class Unused(nn.Cell):
    def __init__(self):
        super().__init__()
        self.used = Linear(0)
        self.stopped = Linear(1)
        self.never = Linear(2)

    def construct(self, x):
        return self.used(x) + ops.stop_gradient(self.stopped(x))


def test_a_cell_that_does_not_reach_the_loss_is_absent_with_a_warning(mode):
    network = Loss(Unused())
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=[Linear])
    stats = step(Tensor(X))[1]
    with pytest.warns(UserWarning, match="was not measured") as seen:
        values = step.schema.unpack(stats)
    assert len(seen) == 2
    for cell in ("body.stopped", "body.never"):
        assert values[f"activation/count/{cell}"] == 0 and f"activation/mean/{cell}" not in values
    assert values["activation/count/body.used"] == 1


# ---- values that are not finite, zero, huge and tiny

class Passed(nn.Cell):
    """Passes its input on through a cell, so that any values can be measured; the loss is the sum times 0 plus a weight."""

    def __init__(self):
        super().__init__()
        self.inner = Add()

    def construct(self, x):
        return ops.ReduceSum()(self.inner(x))


class Add(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(1, np.float32)), name="w")

    def construct(self, x):
        return x + self.w


@pytest.fixture(scope="module")
def passing():
    steps = {}

    def values(mode, x):
        if mode not in steps:
            network = Passed()
            steps[mode] = network, InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=[Add],
                                                    activation_stats=ALL_STATS)
        step = steps[mode][1]
        return step.schema.unpack(step(Tensor(x))[1])
    return values


WITH = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


@pytest.mark.parametrize("position", [(0, 0), (0, 1), (3, 7), (1, 0), (2, 255), (3, 255)])
@pytest.mark.parametrize("bad", WITH)
def test_one_bad_element_shows_wherever_it_is(mode, passing, bad, position):
    x = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    x[position] = WITH[bad]
    values = passing(mode, x)
    assert values["activation/nonfinite/inner"] == 1
    assert values["activation/nonfinite_elements/inner"] == 1
    for stat in ("mean", "rms", "absmax"):
        assert not np.isfinite(values[f"activation/{stat}/inner"]), stat
    assert np.isnan(values["activation/absmax/inner"]) == (bad == "nan")


@pytest.mark.parametrize("magnitude", [0.0, 1e-15, 1.0, 1e15])
def test_magnitudes_inside_the_range_are_right(mode, passing, magnitude):
    x = (np.random.default_rng(1).normal(size=(4, 256)) * magnitude).astype(np.float32)
    values = passing(mode, x)
    check(values, "inner", x)


@pytest.mark.parametrize("magnitude", [1e-25, 1e-18, 1e25])
def test_magnitudes_outside_the_range_show_as_non_finite(mode, passing, magnitude):
    x = (np.random.default_rng(1).normal(size=(4, 256)) * magnitude).astype(np.float32)
    values = passing(mode, x)
    assert not np.isfinite(values["activation/rms/inner"])
    assert values["activation/absmax/inner"] == pytest.approx(np.abs(x).max(), rel=1e-6)
    assert values["activation/nonfinite/inner"] == 0


def test_a_root_mean_square_by_itself_tells_what_cancels_from_zeros(mode):
    network = Passed()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=[Add], activation_stats=["rms"])
    for magnitude, expected in ((1e-25, np.nan), (0, 0)):
        x = np.tile(np.array([magnitude, -magnitude], np.float32), (4, 128))
        assert step.schema.unpack(step(Tensor(x))[1])["activation/rms/inner"] == pytest.approx(expected, nan_ok=True)


def test_zeros_are_counted(mode, passing):
    x = np.random.default_rng(2).normal(size=(4, 256)).astype(np.float32)
    x[:, ::3] = 0
    assert passing(mode, x)["activation/zero_fraction/inner"] == np.mean(x == 0)


class Dropped(nn.Cell):
    """The loss is the mean of a dropped input, so that loss, gradient and tap all show the mask."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.ones((64, 64), np.float32)), name="w")
        self.dropout = nn.Dropout(p=0.5)

    def construct(self, x):
        return ops.ReduceMean()(self.dropout(x * self.w))


def test_loss_gradient_and_taps_of_one_step_share_one_mask(mode):
    network = Dropped()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=[nn.Dropout]).set_train()
    x = Tensor(np.ones((64, 64), np.float32))
    losses = set()
    for _ in range(3):
        values = step.schema.unpack(step(x)[1])
        kept = 1 - values["activation/zero_fraction/dropout"]
        assert 0.4 < kept < 0.6
        assert values["loss"] == pytest.approx(2 * kept, rel=1e-5)  # kept elements are doubled
        assert values["activation/mean/dropout"] == pytest.approx(2 * kept, rel=1e-5)
        assert values["grad/norm"] == pytest.approx(2 / 4096 * np.sqrt(4096 * kept), rel=1e-5)
        losses.add(values["loss"])
    assert len(losses) > 1  # a new mask each step
