"""`every`: which steps are measured, that nothing else differs, and that the others say what they are."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from instrument import InstrumentedStep
from instrument.schedule import draws_random_numbers
from networks import MLP, InAnotherCell, adam, mlp_batches, values_of

STEPS = 8


class Noisy(nn.Cell):
    """The loss is a mean of what Dropout leaves, so two steps with one mask and one input have one loss."""

    def __init__(self, functional=False):
        super().__init__()
        self.w = ms.Parameter(Tensor(np.ones(4096), ms.float32), name="w")
        self.dropout = nn.Dropout(p=0.5)
        self.functional = functional
        if functional:
            del self.dropout

    def construct(self, x):
        y = self.w * x
        y = ops.dropout(y, 0.5) if self.functional else self.dropout(y)
        return ops.ReduceMean()(y * y)


def rows_of(step, batches, call=None):
    return [step.schema.unpack((call or step)(*map(Tensor, batch))[1]) for batch in batches]


@pytest.fixture(params=["called", "in another graph"])
def where(request, mode):
    if mode == "pynative" and request.param != "called":
        pytest.skip("in PyNative mode a cell that lies in another one is called like any other")
    return request.param


def called(step, where):
    return step if where == "called" else InAnotherCell(step).set_train()


OPTIONS = [{}, {"loss_scale": 8.0, "max_grad_norm": 0.05}, {"accumulate": 2, "max_grad_norm": 0.05}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "-")
def test_measured_rows_and_weights_are_those_of_measuring_always(mode, where, options):
    batches = mlp_batches(STEPS * options.get("accumulate", 1))
    weights, rows = [], []
    for every in (1, 3):
        network = MLP()
        optimizer = adam(network)
        step = InstrumentedStep(network, optimizer, activations="leaves", every=every, **options)
        rows.append(rows_of(step, batches, called(step, where)))
        weights.append(values_of(list(network.get_parameters()) + list(optimizer.get_parameters())))
    assert all(np.array_equal(a, b) for a, b in zip(*weights))
    always, some = rows
    by_step = {row["step"]: row for row in always}
    seen = [row["step"] for row in some[options.get("accumulate", 1) - 1::options.get("accumulate", 1)]]
    assert seen == [1, 1, 3, 3, 3, 6, 6, 6]
    for row in some:
        if row["step"]:
            assert row == by_step[row["step"]]


def test_the_coming_step_is_measured_when_asked_for(mode, where):
    network = MLP()
    step = InstrumentedStep(network, adam(network), activations="leaves", every=100)
    call = called(step, where)
    batches = mlp_batches(6)
    assert [row["step"] for row in rows_of(step, batches[:3], call)] == [1, 1, 1]
    step.measure_next()
    (row, after) = rows_of(step, batches[3:5], call)
    assert row["step"] == after["step"] == 4
    assert row["activation/count/act"] == 1 and row["activation/rms/act"] > 0


def test_asked_for_in_the_middle_of_an_accumulated_step_the_next_whole_one_is_measured(mode):
    network = MLP()
    step = InstrumentedStep(network, adam(network), activations="leaves", every=100, accumulate=2)
    batches = mlp_batches(8)
    rows_of(step, batches[:3])
    step.measure_next()
    rows = rows_of(step, batches[3:7])
    assert [row["step"] for row in rows] == [1, 1, 3, 3]
    assert rows[2]["activation/count/act"] == 2


def test_before_the_first_measured_step_there_is_no_number(mode):
    network = MLP()
    step = InstrumentedStep(network, adam(network), activations=None, every=4)
    step.set_step(9)
    rows = rows_of(step, mlp_batches(4))
    assert [row["step"] for row in rows] == [10, 10, 12, 12]  # a new step always starts with a measured one


def test_alternating_compiles_nothing_again():
    network = MLP()
    step = InstrumentedStep(network, adam(network), every=2)
    rows_of(step, mlp_batches(3))
    graphs = set(step.compile_cache)
    rows_of(step, mlp_batches(6))
    assert step.compile_cache == graphs and len(graphs) == 2


@pytest.mark.compiles
@pytest.mark.parametrize("functional", [False, True])
def test_masks_do_not_come_twice(functional):
    ms.set_seed(1)
    network = Noisy(functional)
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), every=2)
    step.set_train()
    x = Tensor(np.random.default_rng(0).normal(size=4096), ms.float32)  # two masks have two losses
    rows = [step(x) for _ in range(10)]
    losses = [float(loss.asnumpy()) for loss, _ in rows]
    assert [float(stats.asnumpy()[0]) for _, stats in rows] == [1, 2, 2, 4, 4, 6, 6, 8, 8, 10]
    assert len(set(losses)) == len(losses), losses
    assert draws_random_numbers(network) == (not functional)
    assert step.is_random


def test_an_overflow_on_an_unmeasured_step_is_skipped(mode, where):
    network = MLP()
    step = InstrumentedStep(network, adam(network), activations="leaves", every=10, loss_scale=4.0)
    call = called(step, where)
    x, y = mlp_batches(1)[0]
    bad = x.copy()
    bad[0, 0] = np.nan
    rows_of(step, [(x, y)], call)
    before = values_of(network.get_parameters())
    rows_of(step, [(bad, y)], call)
    assert all(np.array_equal(a, b) for a, b in zip(before, values_of(network.get_parameters())))
    rows_of(step, [(x, y)], call)
    assert not any(np.array_equal(a, b) for a, b in zip(before, values_of(network.get_parameters())))


def test_an_exception_does_not_shift_the_steps(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network = MLP()
    step = InstrumentedStep(network, adam(network), every=3)
    batches = mlp_batches(5)
    rows_of(step, batches[:2])
    with pytest.raises(Exception, match="."):
        step(Tensor(np.ones((2, 3), np.float32)), Tensor(np.ones((2, 4), np.float32)))
    assert [row["step"] for row in rows_of(step, batches[2:])] == [3, 3, 3]


def fails(step):
    with pytest.raises(Exception, match="."):
        step(Tensor(np.ones((2, 3), np.float32)), Tensor(np.ones((2, 4), np.float32)))


def test_what_was_asked_for_is_measured_after_an_exception_too(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network = MLP()
    step = InstrumentedStep(network, adam(network), activations="leaves", every=100, accumulate=2)
    batches = mlp_batches(8)
    rows_of(step, batches[:2])
    step.measure_next()
    fails(step)
    rows_of(step, batches[2:3])
    fails(step)  # in the middle of the step
    (row,) = rows_of(step, batches[3:4])
    assert row["step"] == 2 and row["activation/count/act"] == 2
    step.measure_next()
    rows = rows_of(step, batches[4:])
    assert [(row["step"], row["activation/count/act"]) for row in rows] == [(2, 2), (3, 2), (3, 2), (3, 2)]


def test_the_schedule_goes_on_when_the_mode_changes():
    network = Noisy()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), every=4).set_train()
    x, seen = Tensor(np.ones(4096), ms.float32), []
    try:
        for mode in (ms.PYNATIVE_MODE, ms.GRAPH_MODE, ms.PYNATIVE_MODE):
            ms.set_context(mode=mode)
            seen += [int(step(x)[1].asnumpy()[0]) for _ in range(6)]
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)
    assert seen == [1, 1, 1, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12, 16, 16, 16]


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_refused(every):
    network = MLP()
    with pytest.raises(ValueError, match="`every` must be a whole number"):
        InstrumentedStep(network, adam(network), every=every)
