"""What the step refuses, with which words, and that the network is then as it was."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from instrument import Histogram, InstrumentedStep, remove_taps
from networks import MLP, mlp_batches


def sgd(network):
    return nn.SGD(network.trainable_params(), 0.1)


def picture(network):
    """Everything of a network that a failed step must leave alone."""
    return {"cells": [(name, cell, type(cell)) for name, cell in network.cells_and_names()],
            "parameters": [(p.name, p.requires_grad, p.asnumpy().tobytes()) for p in network.get_parameters()],
            "trainable": [p.name for p in network.trainable_params()]}


def without_classes(taken):
    return {**taken, "cells": [(name, cell) for name, cell, _ in taken["cells"]]}


def plain_training(network):
    """Two steps of the stock cell; the parameters afterwards."""
    step = nn.TrainOneStepCell(network, sgd(network)).set_train()
    for batch in mlp_batches(2):
        step(*map(Tensor, batch))
    return [p.asnumpy().copy() for p in network.get_parameters()]


@pytest.fixture(scope="module")
def untouched():
    """By mode: what the stock cell makes of an `MLP` that no `InstrumentedStep` has seen."""
    trained = {}

    def parameters(mode):
        if mode not in trained:
            trained[mode] = plain_training(MLP())
        return trained[mode]
    return parameters


def trains_as_if_untouched(network, expected):
    return all(np.array_equal(a, b) for a, b in zip(plain_training(network), expected))


class Bias(nn.Cell):
    """Its parameter is called `b` wherever the cell stands."""

    def __init__(self, trained=True):
        super().__init__(auto_prefix=False)
        self.b = Parameter(Tensor(np.ones(16, np.float32)), name="b", requires_grad=trained)

    def construct(self, x):
        return x + self.b


class TwoOfOneName(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)
        self.first = Bias()
        self.frozen = Bias(trained=False)

    def construct(self, x, y):
        return ops.ReduceMean()(self.frozen(self.first(x)))


# What is wrong: (a function from a good network to the two arguments, the error, what its message says).
WRONG_NETWORK_OR_OPTIMIZER = {
    "a function as the network": (lambda net: (net.construct, sgd(net)), TypeError,
                                  r"`network` must be a Cell that returns the loss, but it is a method\. .* nn\.WithLossCell"),
    "a class as the network": (lambda net: (MLP, sgd(net)), TypeError, r"`network` must be a Cell .* nn\.WithLossCell"),
    "nothing as the network": (lambda net: (None, sgd(net)), TypeError, "`network` must be a Cell .* NoneType"),
    "a plain step as the network": (
        lambda net: (nn.TrainOneStepCell(net, sgd(net)), sgd(net)), ValueError,
        r"`network` is a TrainOneStepCell, a training step already\. Pass the network inside it \(its attribute `network`\)"),
    "a loss-scale step as the network": (
        lambda net: (nn.TrainOneStepWithLossScaleCell(net, sgd(net), Tensor(1.0, ms.float32)), sgd(net)), ValueError,
        r"`network` is a TrainOneStepWithLossScaleCell, a training step already\. Pass the network inside"),
    "no optimizer": (lambda net: (net, None), ValueError, r"`optimizer` must be an optimizer Cell .*\.trainable_params\(\)"),
    "an optimizer's class": (lambda net: (net, nn.SGD), ValueError, "`optimizer` must be an optimizer Cell"),
    "an optimizer without parameters": (
        lambda net: (net, nn.ReLU()), ValueError,
        r"`optimizer` must be an optimizer Cell with parameters, but ReLU has none\. .*\.trainable_params\(\), which must"),
    "an optimizer of another network": (
        lambda net: (net, sgd(MLP())), ValueError,
        r"`optimizer` updates parameters that are not in `network`: first\.weight.* trainable_params\(\) of this very"),
    "an optimizer of this network and of another parameter": (
        lambda net: (net, nn.SGD([*net.trainable_params(), Parameter(Tensor([1.0]), name="stranger")], 0.1)), ValueError,
        r"not in `network`: stranger\. Make it with"),
}

# (arguments, the error, what its message says)
WRONG_ARGUMENTS = [
    ({"activations": ["frist"]}, ValueError, "'frist' matches no cell .* Near names: first"),
    ({"activations": "first"}, TypeError, r"`activations` must be .* One expression goes into a list\."),
    ({"activation_stats": ["rms", "median"]}, ValueError,
     r"`activation_stats` must be a sequence out of count, mean, rms.* it is \['rms', 'median'\]"),
    ({"activation_stats": "rms"}, ValueError, "`activation_stats` must be a sequence .* it is 'rms'"),
    ({"activation_stats": 1}, (TypeError, ValueError), "`activation_stats` must be a sequence"),
    ({"loss_scale": nn.ReLU()}, TypeError,
     r"`loss_scale` is a ReLU, which has no get_loss_scale\(\)\. Use nn\.DynamicLossScaleUpdateCell"),
    ({"loss_scale": Tensor(1024, ms.int32)}, ValueError,
     r"`loss_scale` as a Tensor must be float32 of shape \(\) or \(1,\), but it is Int32"),
    ({"loss_scale": Tensor([1.0, 2.0], ms.float32)}, ValueError, r"`loss_scale` as a Tensor must be .* of shape \(2,\)"),
    *[({argument: value}, ValueError, message + f".* it is .*{value}")
      for argument, message in [("max_grad_norm", r"`max_grad_norm` must be a positive number or None \(no clipping\)"),
                                ("loss_scale", "`loss_scale` must be a positive number, a Tensor, an update cell or None")]
      for value in (0, -1, float("nan"), float("inf"), "1", True)],
    *[({"accumulate": value}, ValueError, f"`accumulate` must be a whole number of calls from 1, but it is .*{value}")
      for value in (0, -1, 1.5, 2.0, True, "2", None)],
    *[({flag: value}, TypeError, f"`{flag}` must be True or False, but it is {value!r}")
      for flag in ("activation_gradients", "per_parameter", "counts", "updates", "moments", "attention", "ranks",
                   "allow_unverified") for value in (1, "no", None)],
    *[({"loss_key": value}, TypeError, rf"`loss_key` must be a key \(str\), an index \(int\) or None, but it is {value}")
      for value in (1.5, True)],
]

REFUSED_WHEN_MADE = [
    *[pytest.param(lambda net, make=make: InstrumentedStep(*make(net)), error, message, id=case)
      for case, (make, error, message) in WRONG_NETWORK_OR_OPTIMIZER.items()],
    *[pytest.param(lambda net, wrong=wrong: InstrumentedStep(net, sgd(net), **wrong), error, message, id=str(wrong))
      for wrong, error, message in WRONG_ARGUMENTS],
]


@pytest.fixture(scope="module")
def much_abused():
    """One network on which every wrong step is tried."""
    return MLP()


@pytest.mark.parametrize("make, error, message", REFUSED_WHEN_MADE)
def test_refused_when_made(make, error, message, much_abused):
    before = picture(much_abused)
    with pytest.raises(error, match=message):
        make(much_abused)
    assert picture(much_abused) == before


def test_the_network_trains_after_all_of_them(mode, untouched):
    network = MLP()
    for make, error, _ in (case.values for case in REFUSED_WHEN_MADE):
        with pytest.raises(error):
            make(network)
    assert trains_as_if_untouched(network, untouched(mode))


def test_inputs_by_name_are_refused(mode):
    network = MLP()
    step = InstrumentedStep(network, sgd(network))
    x, y = map(Tensor, mlp_batches(1)[0])
    with pytest.raises(TypeError, match="InstrumentedStep takes its inputs by position, .* but it is given y by name"):
        step(x, y=y)
    assert np.isfinite(float(step(x, y)[0]))


def test_a_name_collision_is_refused():
    network = TwoOfOneName()
    before = picture(network)
    with pytest.raises(ValueError, match=r"name '?b'? .*(unique|twice)"):
        InstrumentedStep(network, sgd(network), activations="leaves")
    assert picture(network) == before


@pytest.mark.parametrize("setting", [{"parallel_mode": "semi_auto_parallel"}, {"enable_parallel_optimizer": True}])
def test_parallel_modes_in_which_tensors_are_shards_are_refused(setting):
    network = MLP()
    optimizer = sgd(network)
    before = picture(network)
    ms.set_auto_parallel_context(**setting)
    try:
        with pytest.raises(ValueError, match="tensors of this rank can be shards"):
            InstrumentedStep(network, optimizer)
    finally:
        ms.reset_auto_parallel_context()
    assert picture(network) == before


def test_loss_scaling_is_refused_where_an_overflow_does_not_show(monkeypatch):
    monkeypatch.setattr("instrument._compat.device_target", lambda: "Ascend")
    monkeypatch.setenv("MS_ASCEND_CHECK_OVERFLOW_MODE", "SATURATION_MODE")
    network = MLP()
    with pytest.raises(ValueError, match="MS_ASCEND_CHECK_OVERFLOW_MODE=INFNAN_MODE"):
        InstrumentedStep(network, sgd(network), loss_scale=1024.0)
    InstrumentedStep(network, sgd(network))  # nothing looks for overflow here


# --- two steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["leaves", None])
@pytest.mark.parametrize("second", ["leaves", None])
def test_a_second_step_around_one_network_is_refused(first, second):
    network = MLP()
    step = InstrumentedStep(network, sgd(network), activations=first)
    before = picture(network)
    with pytest.raises(ValueError, match=r"`network` already has an InstrumentedStep\. .* remove_taps\(\) on the other step"):
        InstrumentedStep(network, sgd(network), activations=second)
    assert picture(network) == before  # the first step's taps included
    assert step.owns(network.first) == (first is not None)


def test_a_second_step_is_allowed_after_remove_taps():
    network = MLP()
    before = picture(network)
    first = InstrumentedStep(network, sgd(network), activations="leaves")
    first.remove_taps()
    assert picture(network) == before
    second = InstrumentedStep(network, sgd(network), activations="leaves")
    first.remove_taps()  # once more, and late: it must not touch the other step's taps
    assert second.owns(network.first) and picture(network) != before
    second.remove_taps()
    assert picture(network) == before


def test_a_second_step_is_allowed_after_del():
    network = MLP()
    before = picture(network)
    step = InstrumentedStep(network, sgd(network), activations="leaves")
    del step
    second = InstrumentedStep(network, sgd(network), activations=["^first$"])
    tapped = [name for name, cell, kind in picture(network)["cells"] if (name, cell, kind) not in before["cells"]]
    assert tapped == ["first"]  # and no tap of the step that is gone
    second.remove_taps()
    assert picture(network) == before


def test_after_del_of_a_step_that_has_run_the_network_is_freed_by_hand(mode):
    network = MLP()
    step = InstrumentedStep(network, sgd(network), activations=["^first$"])
    step(*map(Tensor, mlp_batches(1)[0]))
    del step
    try:  # MindSpore keeps compiled cells alive, in some releases and modes
        InstrumentedStep(network, sgd(network), activations=["^first$"])
    except ValueError as error:
        assert "instrument.remove_taps(network)" in str(error)
        remove_taps(network)
        InstrumentedStep(network, sgd(network), activations=["^first$"])


def test_a_step_around_a_wrapped_network_that_is_measured_already_is_refused():
    network = MLP()
    step = InstrumentedStep(network, sgd(network), activations="leaves")
    wrapped = nn.SequentialCell(network)
    before = picture(wrapped)
    with pytest.raises(ValueError, match=r"cell '0\.first' is already measured by another InstrumentedStep.*remove_taps\(\)"):
        InstrumentedStep(wrapped, sgd(wrapped), activations="leaves")
    assert picture(wrapped) == before and step.owns(network.first)


class Half(nn.Cell):
    """One of two networks that share an encoder."""

    def __init__(self, encoder):
        super().__init__()
        self.head = nn.Dense(16, 1)  # before the encoder: refused on the second cell, the first must not stay tapped
        self.encoder = encoder

    def construct(self, x, y):
        return ops.ReduceMean()(ops.square(self.head(self.encoder(x))))


@pytest.fixture
def halves():
    encoder = nn.Dense(16, 16)
    return Half(encoder), Half(encoder)


def test_a_cell_of_two_networks_is_measured_by_one_step(halves):
    one, other = halves
    step = InstrumentedStep(one, sgd(one), activations="leaves")
    before = picture(other)
    with pytest.raises(ValueError, match=r"cell 'encoder' is already measured by another InstrumentedStep.*remove_taps\(\)"):
        InstrumentedStep(other, sgd(other), activations="leaves")
    assert picture(other) == before and step.owns(one.encoder)
    step.remove_taps()
    assert InstrumentedStep(other, sgd(other), activations="leaves").owns(other.encoder)


def test_two_networks_that_share_a_cell_are_measured_side_by_side_where_they_differ(halves):
    one, other = halves
    first = InstrumentedStep(one, sgd(one), activations="leaves")
    second = InstrumentedStep(other, sgd(other), activations=["head"])
    assert first.owns(one.encoder) and second.owns(other.head) and not second.owns(other.encoder)
    second.remove_taps()
    assert first.owns(one.encoder)


class Both(nn.Cell):
    """Two steps in one graph, as of a generator and a discriminator."""

    def __init__(self, first, second):
        super().__init__()  # with prefixes, because the names of the two optimizers' Parameters are alike
        self.first, self.second = first, second

    def construct(self, x, y):
        return self.first(x, y)[1], self.second(x, y)[1]


@pytest.mark.parametrize("options", [{}, {"every": 2, "accumulate": 2, "window": 3, "updates": True, "activations": "leaves",
                                          "histograms": [Histogram("activation", "act", every=2)]}], ids=["-", "options"])
def test_two_steps_lie_in_one_graph(mode, options):
    rows = []
    for together in (False, True):
        steps = []
        for seed in (0, 1):
            network = MLP(seed)
            network.update_parameters_name(f"{seed}.")
            steps.append(InstrumentedStep(network, sgd(network), **options))
        both = Both(*steps).set_train()
        for batch in mlp_batches(4):
            inputs = list(map(Tensor, batch))
            vectors = both(*inputs) if together else [step(*inputs)[1] for step in steps]
        rows.append([vector.asnumpy() for vector in vectors])
    for alone, beside in zip(*rows):
        assert np.allclose(alone, beside, rtol=1e-6, atol=0, equal_nan=True) and alone[0] > 0


# --- what shows at the first call ---------------------------------------------------------------------------------------


class Outputs(nn.Cell):
    """An `MLP` whose loss comes back in the shape that is asked for."""

    def __init__(self, kind):
        super().__init__()
        self.body = MLP()
        self.kind = kind
        self.index = ToIndex()

    def construct(self, x, y):
        loss = self.body(x, y)
        if self.kind == "pair":
            return loss, loss * 2
        if self.kind == "named":
            return {"total": loss, "cls_loss": loss * 2}
        if self.kind == "empty":
            return ()
        if self.kind == "vector":
            return ops.ReduceMean()(x, 1) * loss
        if self.kind == "integer":
            return self.index(loss)
        if self.kind == "with index":
            return loss, self.index(loss)
        return loss


class ToIndex(nn.Cell):
    """A cell with an integer output."""

    def construct(self, x):
        return ops.cast(x * 100, ms.int32)


def no_key(key, returned):
    return f"^loss_key={key} does not exist: the network returns {returned}"


def no_scalar(shape, dtype):
    return rf"^the loss must be a scalar of a float type, but its shape is \({shape}\) and its type {dtype}\. .*ReduceMean\(\)"


# What is wrong: (kind of output, arguments, the error, what its message says).
REFUSED_AT_THE_FIRST_CALL = {
    "an index behind the last": ("pair", {"loss_key": 2}, ValueError, no_key(2, r"\[0, 1\]")),
    "an index before the first": ("pair", {"loss_key": -1}, ValueError, no_key(-1, r"\[0, 1\]")),
    "a key of a tuple": ("pair", {"loss_key": "total"}, ValueError, no_key("'total'", r"\[0, 1\]")),
    "an index of a dict": ("named", {"loss_key": 0}, ValueError, no_key(0, r"\['total', 'cls_loss'\]")),
    "a misspelt key": ("named", {"loss_key": "cls_los"}, ValueError,
                       no_key("'cls_los'", r"\['total', 'cls_loss'\]\. Near: cls_loss")),
    "a key of a single output": ("scalar", {"loss_key": "total"}, ValueError,
                                 no_key("'total'", r"one value\. Leave loss_key out\.")),
    "no output at all": ("empty", {}, ValueError, "^(the loss must be|loss_key=None)"),
    "a vector": ("vector", {}, ValueError, no_scalar("8,", "Float32")),
    "an integer": ("integer", {}, ValueError, no_scalar("", "Int32")),
    "an integer by its key": ("with index", {"loss_key": 1}, ValueError, no_scalar("", "Int32")),
    "a measured cell with an integer output": (
        "with index", {"activations": ["index"]}, TypeError,
        r"^cell 'index' cannot be measured: its output has no float tensor, only .*[Ii]nt32.* the argument `activations`"),
}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """MindSpore writes `rank_0/om/analyze_fail.ir` into the working directory when a graph does not compile."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", REFUSED_AT_THE_FIRST_CALL)
def test_refused_at_the_first_call(mode, case, untouched, elsewhere):
    kind, arguments, error, message = REFUSED_AT_THE_FIRST_CALL[case]
    network = Outputs(kind)
    before = picture(network)
    step = InstrumentedStep(network, sgd(network), **{"activations": "leaves", **arguments})
    for _ in range(2):  # trying again must not get any further
        with pytest.raises(error, match=message):
            step(*map(Tensor, mlp_batches(1)[0]))
    assert without_classes(picture(network)) == without_classes(before)
    step.remove_taps()
    assert picture(network) == before
    assert trains_as_if_untouched(network.body, untouched(mode))


def test_the_network_trains_beside_a_step_that_failed(mode, untouched, elsewhere):
    network = Outputs("vector")
    step = InstrumentedStep(network, sgd(network), activations="leaves")
    with pytest.raises(ValueError):
        step(*map(Tensor, mlp_batches(1)[0]))
    assert step.owns(network.body.first)
    assert trains_as_if_untouched(network.body, untouched(mode))


def test_the_right_step_works_after_a_wrong_one(mode, elsewhere):
    network = Outputs("named")
    wrong = InstrumentedStep(network, sgd(network), loss_key="cls_los")
    with pytest.raises(ValueError, match="Near: cls_loss"):
        wrong(*map(Tensor, mlp_batches(1)[0]))
    wrong.remove_taps()
    right = InstrumentedStep(network, sgd(network), loss_key="cls_loss")
    loss, stats = right(*map(Tensor, mlp_batches(1)[0]))
    values = right.schema.unpack(stats)
    assert values["loss"] == float(loss.asnumpy()) == 2 * values["loss/total"]
