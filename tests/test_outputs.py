"""StepOutputs: what is read of a call, once, and at which learning rate it was made."""
import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from instrument.outputs import Call, Reading, StepOutputs
from instrument.pace import Mark
from instrument.schema import Metric, Schema
from networks import MLP

NAMES = [Metric("step", "step", "global", "identical"), Metric("loss", "loss", "local", "mean")]
SKIPPED = Metric("skipped", "flag", "global", "identical")


class Step:
    """Stands for an InstrumentedStep."""

    schema = Schema(NAMES)
    window = None

    def __init__(self, optimizer=None, skips=False):
        self.optimizer = optimizer
        if skips:
            self.schema = Schema([*NAMES, SKIPPED])
        self.step_count = Tensor(0, ms.int32)

    def made(self, steps, updates):
        """As many steps and updates have been made."""
        self.step_count = Tensor(steps, ms.int32)
        self.optimizer.global_step.set_data(Tensor([updates], ms.int32))


def call(outputs, number=1):
    return Call(outputs, number, Mark(number, 0.0, None), 5.0, {})


def scheduled(rates=(0.5, 0.25, 0.125, 0.0625)):
    return nn.SGD(MLP().trainable_params(), list(rates))


@pytest.mark.parametrize("outputs, loss", [
    (Tensor(0.5, ms.float32), 0.5), ((Tensor(0.5, ms.float32), Tensor(True)), 0.5), ([0.5, 1.0], 0.5),
    (Tensor([0.5], ms.float32), 0.5), (None, None), ((), None), (Tensor([1.0, 2.0], ms.float32), None),
    ({"a": 1.0}, None), ({"loss": Tensor(0.5, ms.float32), "a": 1.0}, 0.5)])
def test_of_a_plain_train_cell_the_loss_is_read_where_there_is_one(outputs, loss):
    cell = StepOutputs(nn.ReLU())
    cell.begin(0, 10)
    (reading,) = cell.read(call(outputs, cell.steps_made(2)))
    assert reading.step == 12 and reading.values == ({} if loss is None else {"loss": loss})


def test_a_vector_is_copied_and_named_later():
    vector = np.array([3.0, math.nan], np.float32)
    (reading,) = StepOutputs(Step()).read(call((0.0, vector)))
    vector[:] = 7.0
    record = Reading(reading.step, reading.time, {"epoch": 0.5}, reading.vector, reading.schema, {"sample/0": "x"}).record()
    assert (record.step, record.time, record.texts) == (3, 5.0, {"sample/0": "x"})
    assert math.isnan(record.values["loss"]) and record.values["epoch"] == 0.5


def test_a_vector_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"shape \(3,\), but its schema has 2 elements"):
        StepOutputs(Step()).read(call((0.0, [1.0, 2.0, 3.0])))


@pytest.mark.parametrize("number", [math.nan, math.inf, 0.0])
def test_a_vector_without_the_number_of_a_step_is_none(number):
    assert StepOutputs(Step()).read(call((0.0, [number, 2.0]))) == []


@pytest.mark.parametrize("outputs, loss", [(Tensor(0.5, ms.float32), 0.5), ((Tensor(0.5, ms.float32),), 0.5),
                                           ({"loss": Tensor(0.5, ms.float32)}, 0.5), ((0.5, Tensor(1.0, ms.float32)), 0.5),
                                           ((Tensor(0.5, ms.float32), False, Tensor([1.0, 2.0], ms.float32)), 0.5)])
def test_a_cell_around_the_step_that_does_not_return_the_vector_gives_the_loss_and_is_told(outputs, loss):
    cell = Step()
    cell.step_count = Tensor(7, ms.int32)
    reader = StepOutputs(cell)
    assert reader.is_new(outputs)
    with pytest.warns(UserWarning, match="does not return what the step in it returns, so the loss alone"):
        (reading,) = reader.read(call(outputs, reader.number_of(outputs, 3)))
    assert (reading.step, reading.values) == (7, {"loss": loss})
    assert reader.is_new(outputs) and len(reader.read(call(outputs))) == 1  # told once


@pytest.mark.parametrize("every", [1, 3])
def test_the_number_of_a_step_is_exact_where_float32_is_not(every):
    step_cell = Step()
    step_cell.every = every
    outputs, numbers = StepOutputs(step_cell), []
    assert outputs.may_wait
    for step in range(2 ** 24 - 5, 2 ** 24 + 13):
        step_cell.step_count = Tensor(step, ms.int32)
        if step % every == 0:
            numbers += [reading.step for reading in outputs.read(call((0.0, [np.float32(step), 2.0])))]
    assert numbers == [step for step in range(2 ** 24 - 5, 2 ** 24 + 13) if step % every == 0]
    assert not outputs.may_wait  # after another call the counter would be that one's


def test_rows_of_a_window_are_numbered_on_where_float32_is_not_exact():
    class Windowed(Step):
        window, step_count = 4, Tensor(0, ms.int32)

        def read_window(self):
            return [[np.float32(2 ** 24 + i), 2.0] for i in range(-1, 3)], 0

    assert [reading.step for reading in StepOutputs(Windowed()).read(call((0.0, None)))] == [2 ** 24 + i for i in range(-1, 3)]


def test_outputs_that_come_again_are_not_new():
    outputs = StepOutputs(Step())
    vector, other = np.ndarray.view(np.zeros(2, np.float32)), Tensor([1.0, 2.0])
    assert outputs.is_new((0.0, other)) and not outputs.is_new((1.0, other)) and outputs.is_new((0.0, vector))
    plain = StepOutputs(nn.ReLU())
    assert plain.is_new(other) and plain.is_new(other)


# Learning rates

def test_a_fixed_rate_belongs_to_the_call_just_made():
    outputs = StepOutputs(Step(nn.SGD(MLP().trainable_params(), 0.5)))
    assert outputs.rates_now() == {"learning_rate": 0.5} and outputs.may_wait
    (reading,) = outputs.read(call((0.0, [1.0, 0.0])))
    assert outputs.scheduled_rates(reading, is_last=True) == {}


def test_a_schedule_without_skips_is_known_for_each_step():
    step = Step(scheduled())
    step.made(1, 2)  # the optimizer had made an update before
    outputs = StepOutputs(step)
    assert outputs.rates_now() == {} and outputs.may_wait
    rates = []
    for number in (1, 2, 3):
        step.made(number + 1, number + 2)  # the next step has been made already
        (reading,) = outputs.read(call((0.0, [float(number), 0.0])))
        rates.append(outputs.scheduled_rates(reading, is_last=False)["learning_rate"])
    assert rates == [0.25, 0.125, 0.0625]


def test_a_schedule_with_skips_is_known_for_the_last_step_alone():
    step = Step(scheduled(), skips=True)
    outputs = StepOutputs(step)
    assert not outputs.may_wait
    rates = []
    for number, updates, skipped in ((1, 1, 0), (2, 1, 1), (3, 2, 0)):
        step.made(number, updates)
        (reading,) = outputs.read(call((0.0, [number, 0.0, skipped])))
        assert outputs.scheduled_rates(reading, is_last=False) == {}
        rates.append(outputs.scheduled_rates(reading, is_last=True)["learning_rate"])
    assert rates == [0.5, 0.25, 0.25]
    step.made(4, 3)
    assert outputs.scheduled_rates(reading, is_last=True) == {}  # a step has been made since


def test_a_schedule_of_a_plain_cell_is_asked_at_once():
    network = MLP()
    optimizer = nn.SGD(network.trainable_params(), [0.5, 0.25])
    outputs = StepOutputs(nn.TrainOneStepCell(network, optimizer))
    optimizer.global_step.set_data(Tensor([2], ms.int32))
    assert not outputs.may_wait
    (reading,) = outputs.read(call(Tensor(0.5, ms.float32)))
    assert outputs.scheduled_rates(reading, is_last=True) == {"learning_rate": 0.25}


def test_without_an_optimizer_there_is_no_rate():
    outputs = StepOutputs(nn.ReLU())
    assert outputs.rates_now() == {} and outputs.may_wait


def test_a_window_gives_all_its_rows_and_what_was_lost():
    class Windowed(Step):
        window = 2

        def read_window(self):
            return np.array([[4.0, 40.0], [5.0, 50.0]], np.float32), 1

    outputs = StepOutputs(Windowed())
    last = call((0.0, [5.0, 50.0]))
    last.values["epoch"] = 1.0
    readings = outputs.read(last)
    assert [(reading.step, reading.values) for reading in readings] == [(4, {}), (5, {"epoch": 1.0})]
    assert outputs.overwritten == 1 and not outputs.may_wait


@pytest.mark.parametrize("rank, values", [(0, {}), (1, {"loss": 0.5})])
def test_the_loss_of_a_pipeline_is_read_on_its_last_stage_alone(monkeypatch, rank, values):
    monkeypatch.setattr("instrument._compat.rank_and_size", lambda: (rank, 2))
    ms.set_auto_parallel_context(pipeline_stages=2)
    try:
        outputs = StepOutputs(MLP())
    finally:
        ms.reset_auto_parallel_context()
    [reading] = outputs.read(call(Tensor(0.5)))
    assert reading.values == values
