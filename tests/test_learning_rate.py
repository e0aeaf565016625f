"""Learning rates: what is read is what the weights moved by."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from instrument.learning_rate import learning_rates


class Sum(nn.Cell):
    """Every gradient is 1, so that SGD moves each weight by its learning rate."""

    def __init__(self, names=("a", "b", "c")):
        super().__init__()
        self.a, self.b, self.c = (Parameter(Tensor([1.0], ms.float32), name=name) for name in names)

    def construct(self, x):
        return ops.ReduceSum()((self.a + self.b + self.c) * x)


def single(rate):
    return lambda net: nn.SGD(net.trainable_params(), learning_rate=rate)


def grouped(*rates, default=0.1, order=None):
    """One group for each weight; None leaves a group to the default rate."""
    def optimizer(net):
        groups = [{"params": [parameter]} if rate is None else {"params": [parameter], "lr": rate}
                  for parameter, rate in zip((net.a, net.b, net.c), rates)]
        if order is not None:
            groups.append({"order_params": [getattr(net, name) for name in order]})
        return nn.SGD(groups, learning_rate=default)
    return optimizer


def falling(start, end=0.0):
    """Linear over four steps: evaluated at 0, 1 and 2 in the three steps of the test."""
    return nn.PolynomialDecayLR(start, end, 4, 1.0)


ONE = "learning_rate"
A, B, C = (f"learning_rate/{group}" for group in range(3))
KINDS = {
    "number": (single(0.25), [{ONE: 0.25}] * 3),
    "tensor": (lambda net: single(Tensor(0.25, ms.float32))(net), [{ONE: 0.25}] * 3),
    "table": (single([0.5, 0.25, 0.125]), [{ONE: 0.5}, {ONE: 0.25}, {ONE: 0.125}]),
    "schedule": (lambda net: single(falling(0.5, 0.1))(net), [{ONE: 0.5}, {ONE: 0.4}, {ONE: 0.3}]),
    "groups": (grouped(0.5, None, 0.25), [{A: 0.5, B: 0.1, C: 0.25}] * 3),
    "groups that share the default": (grouped(None, None, 0.25), [{A: 0.1, B: 0.1, C: 0.25}] * 3),
    "groups in another order": (grouped(0.5, 0.25, 0.125, order="cab"), [{A: 0.5, B: 0.25, C: 0.125}] * 3),
    "groups without a rate of their own": (grouped(None, None, None), [{ONE: 0.1}] * 3),
    "groups of every kind": (
        lambda net: grouped(falling(0.4), 0.25, [0.5, 0.25, 0.125])(net),
        [{A: 0.4, B: 0.25, C: 0.5}, {A: 0.3, B: 0.25, C: 0.25}, {A: 0.2, B: 0.25, C: 0.125}]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_is_what_the_weights_moved_by(mode, kind):
    make, expected = KINDS[kind]
    net = Sum()
    optimizer = make(net)
    step = nn.TrainOneStepCell(net, optimizer)
    for rates in expected:
        before = [float(p.asnumpy()[0]) for p in (net.a, net.b, net.c)]
        step(Tensor([1.0], ms.float32))
        moved = [old - float(p.asnumpy()[0]) for old, p in zip(before, (net.a, net.b, net.c))]
        read = learning_rates(optimizer)
        # A float32 weight near 1 moves in units of 1.2e-7, and the rate itself is rounded likewise.
        assert read == pytest.approx(rates, abs=2e-7)
        assert moved == pytest.approx([read.get(name, read.get(ONE)) for name in (A, B, C)], abs=4e-7)


def test_reading_does_not_move_the_schedule(mode):
    net = Sum()
    optimizer = nn.SGD(net.trainable_params(), learning_rate=falling(0.5, 0.1))
    step = nn.TrainOneStepCell(net, optimizer)
    step(Tensor([1.0], ms.float32))
    assert [learning_rates(optimizer) for _ in range(3)] == [{ONE: pytest.approx(0.5)}] * 3
    assert optimizer.global_step.asnumpy().tolist() == [1]


def test_before_the_first_update_it_is_the_first_rate():
    assert learning_rates(single([0.5, 0.25])(Sum())) == {ONE: 0.5}


def test_a_skipped_update_has_the_rate_that_it_would_have_used():
    net = Sum()
    optimizer = single([0.5, 0.25, 0.125])(net)
    assert learning_rates(optimizer, skipped=True) == {ONE: 0.5}
    nn.TrainOneStepCell(net, optimizer)(Tensor([1.0], ms.float32))
    assert learning_rates(optimizer, skipped=True) == {ONE: 0.25}


def test_a_rate_set_from_the_host_is_seen():
    optimizer = single(0.5)(Sum())
    optimizer.learning_rate.set_data(Tensor(0.125, ms.float32))
    assert learning_rates(optimizer) == {ONE: 0.125}


def test_an_optimizer_that_keeps_no_groups_numbers_its_different_rates():
    class Own(nn.Optimizer):
        def __init__(self, params):
            super().__init__(0.5, params)

    net = Sum()
    assert learning_rates(Own([{"params": [net.a, net.b]}, {"params": [net.c], "lr": 0.25}])) == {A: 0.5, B: 0.25}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LARS goes with 2.9
@pytest.mark.parametrize("use_clip", [False, True])
def test_lars_has_the_rate_of_the_optimizer_that_it_wraps(use_clip):
    optimizer = nn.LARS(nn.Momentum(Sum().trainable_params(), 0.25, 0.9), use_clip=use_clip)
    assert learning_rates(optimizer) == {ONE: 0.25}


def test_optimizers_with_param_groups_have_one_rate_a_group():
    experimental = pytest.importorskip("mindspore.experimental.optim", reason="not in this release")
    net = Sum()
    optimizer = experimental.SGD([{"params": [net.a]}, {"params": [net.b, net.c], "lr": 0.25}], lr=0.5)
    assert learning_rates(optimizer) == {A: 0.5, B: 0.25}
    assert learning_rates(experimental.SGD([net.a], lr=0.5)) == {ONE: 0.5}


def test_an_optimizer_without_a_rate_has_none():
    assert learning_rates(nn.ReLU()) == {}


def test_rates_are_those_of_float32():
    assert learning_rates(single(0.1)(Sum())) == {ONE: float(np.float32(0.1))}
