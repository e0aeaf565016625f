"""Where a NaN came from: in an activation, in a gradient only, in a weight, in the input, in the loss."""
import copy
import pickle

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from instrument import InstrumentedStep, NormStats
from instrument.nonfinite import FirstNonfinite, first_nonfinite
from networks import MLP

X, Y = np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32)


def dense(seed):
    weight = np.random.default_rng(seed).normal(0, 0.5, (4, 4)).astype(np.float32)
    return nn.Dense(4, 4, weight_init=Tensor(weight), bias_init="zeros")


class _Sick(nn.Cell):
    """y = x * 1, and the root of |w|: finite forward; the gradient of the root at 0 is infinite."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.w = ms.Parameter(Tensor(np.zeros(4) if kind == "gradient" else np.ones(4), ms.float32), name="w")

    def construct(self, x, poison):
        if self.kind == "activation":
            return x * self.w * poison
        if self.kind == "gradient":
            return x + ops.Sqrt()(self.w * self.w * poison) * poison
        return x * self.w


class _Chain(nn.Cell):
    """The cells are defined in another order than they run in."""

    def __init__(self, kind):
        super().__init__()
        self.last = dense(3)
        self.sick = _Sick(kind)
        self.head = dense(4)
        self.first = dense(1)
        self.kind = kind

    def construct(self, x, y, poison):
        x = self.sick(self.first(x), poison)
        error = self.head(self.last(x)) - y
        loss = ops.ReduceMean()(error * error)
        if self.kind == "loss":
            loss = loss * ops.ReduceMean()(poison)
        return loss


def found(kind, poison=1.0, x=X, activation_gradients=True, weight=None, **options):
    network = _Chain(kind)
    if weight is not None:
        parameter = dict(network.parameters_and_names())[weight]
        data = parameter.asnumpy().copy()
        data.flat[0] = np.inf
        parameter.set_data(Tensor(data))
    options = {"activations": ["first", "sick", "last", "head"], **options}
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activation_gradients=activation_gradients,
                            **options)
    _, stats = step(Tensor(x), Tensor(Y), Tensor(poison, ms.float32))
    return step.schema.first_nonfinite(stats)


def test_all_is_well(mode):
    assert found("activation") is None


def test_born_in_an_activation(mode):
    first = found("activation", np.nan)
    assert first == FirstNonfinite("activation", "sick", "activation", "first")
    assert str(first) == "activation sick (after activation first, which was finite; what lies between them was not measured)"


def test_in_the_input(mode):
    x = X.copy()
    x[0, 0] = np.nan
    first = found("activation", x=x)
    assert (first.kind, first.name, first.clean_kind) == ("activation", "first", "weight")


def test_born_in_a_gradient(mode):
    first = found("gradient")
    assert (first.kind, first.name) == ("grad", "sick.w")
    assert (first.clean_kind, first.clean_name) == ("activation_grad", "sick")


def test_born_in_a_gradient_where_only_parameters_are_measured(mode):
    first = found("gradient", activations=None, activation_gradients=False)
    assert (first.kind, first.name) == ("grad", "sick.w")


@pytest.mark.parametrize("weight, before", [("last.weight", "sick.w"), ("first.weight", None)])
def test_in_a_weight(mode, weight, before):
    first = found("", weight=weight)
    assert (first.kind, first.name, first.clean_name) == ("weight", weight, before)


def test_in_the_loss(mode):
    first = found("loss", np.inf)
    assert (first.kind, first.name, first.clean_name) == ("loss", "", "head")


def test_only_totals(mode):
    assert found("", weight="last.weight", per_parameter=False, activations=None, activation_gradients=False).kind == "weight"


def test_an_underflow_of_one_parameter_is_none():
    parameters = [ms.Parameter(Tensor(np.full(8, value), ms.float32), name=name) for name, value in (("a", 1e-25), ("b", 1))]
    norm_stats = NormStats(parameters)
    gradients = tuple(Tensor(np.ones(8), ms.float32) for _ in parameters)
    stats = norm_stats(gradients)
    assert np.isnan(norm_stats.schema.unpack(stats)["weight/norm/a"])
    assert norm_stats.schema.first_nonfinite(stats) is None
    bad = norm_stats((gradients[0], gradients[1] * Tensor(np.inf, ms.float32)))
    assert norm_stats.schema.first_nonfinite(bad) == FirstNonfinite("grad", "b", "grad", "a")


def test_a_cell_that_is_called_twice_does_not_take_the_blame():
    order = [("activation", "a"), ("activation", "act"), ("activation", "b"), ("loss", "")]
    values = {"activation/count/act": 2.0, "activation/nonfinite/a": 0.0, "activation/nonfinite/act": 1.0, "loss": 1.0}
    first = first_nonfinite({**values, "activation/nonfinite/b": 1.0}, order)
    assert first == FirstNonfinite("activation", "b", "activation", "a")
    assert first_nonfinite({**values, "activation/nonfinite/b": 0.0}, order).name == "act"


def test_counts_tell_a_small_gradient_from_a_bad_one():
    values = {"loss": 1.0, "grad/norm": np.nan, "grad/norm/a": np.nan, "grad/norm/b": np.nan}
    order = [("loss", ""), ("grad", "b"), ("grad", "a")]
    assert first_nonfinite(values, order).name == "b"
    assert first_nonfinite({**values, "grad/nonfinite/a": 4.0, "grad/nonfinite/b": 0.0}, order).name == "a"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda schema: pickle.loads(pickle.dumps(schema))])
def test_a_copy_of_the_schema_knows_the_order_without_the_step(copied):
    network = _Chain("activation")
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=["first", "sick", "last", "head"])
    _, stats = step(Tensor(X), Tensor(Y), Tensor(np.nan, ms.float32))
    schema, stats = copied(step.schema), stats.asnumpy()
    assert schema.names == step.schema.names and schema.order is None
    assert copied(schema).first_nonfinite(stats) == schema.first_nonfinite(stats) == step.schema.first_nonfinite(stats)
    assert schema.first_nonfinite(stats).name == "sick"


def test_values_of_a_record_do_as_well():
    network = MLP()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations="leaves")
    values = {"loss": np.nan, "grad/norm": np.nan, "weight/norm": 1.0, "activation/nonfinite/first": 0.0,
              "activation/nonfinite/act": 1.0}
    assert step.schema.first_nonfinite(values).name == "act"
