"""TrainingMonitor makes MindSpore's own training steps measure."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train import Callback, Model

import instrument
from instrument import InstrumentedStep, TrainingMonitor, upgrade
from instrument.upgrade import StepOptions
from networks import MLP
from test_monitor import Loop, Memory, dataset

LOOSE = {"dataset_sink_mode": False}


def parts():
    net = MLP()
    return net, nn.SGD(net.trainable_params(), 0.25)


class Outputs(Callback):
    """Keeps what the step returns."""

    def __init__(self):
        self.seen = []

    def on_train_step_end(self, run_context):
        self.seen.append(run_context.original_args().net_outputs)


class Own(nn.TrainOneStepCell):
    pass


def test_a_stock_step_gives_what_an_instrumented_one_gives(mode):
    memory, twin, outputs = Memory(), Memory(), Outputs()
    cell = nn.TrainOneStepCell(*parts())
    Model(cell).train(1, dataset(3), callbacks=[outputs, TrainingMonitor(writers=[memory])], **LOOSE)
    Model(InstrumentedStep(*parts())).train(1, dataset(3), callbacks=[TrainingMonitor(writers=[twin])], **LOOSE)
    assert memory.steps == twin.steps == [1, 2, 3]
    for ours, theirs in zip(memory.records, twin.records):
        assert set(ours.values) - {"host/memory"} >= {"grad/norm", "weight/norm", "learning_rate", "step_time", "epoch"}
        for name in ours.values:
            if name.startswith(("loss", "grad", "weight", "activation", "learning_rate")):
                assert ours.values[name] == pytest.approx(theirs.values[name], rel=1e-6), name  # two graphs of one formula
    assert [float(loss.asnumpy()) for loss in outputs.seen] == memory.column("loss")  # the loss alone, as ever


@pytest.mark.compiles
def test_the_step_that_model_makes_is_measured_and_so_are_options():
    net, optimizer = parts()
    memory = Memory()
    monitor = TrainingMonitor(writers=[memory], measure=StepOptions(activations=None, every=2, updates=True))
    model = Model(net, optimizer=optimizer)
    model.train(2, dataset(4), callbacks=[monitor], **LOOSE)
    assert memory.steps == [1, 2, 4, 6, 8]
    assert all("update/norm" in record.values and "loss" in record.values for record in memory.records)
    assert not [name for name in memory.records[0].values if name.startswith("activation")]
    later = Memory()
    model.train(1, dataset(4), callbacks=[TrainingMonitor(writers=[later])], **LOOSE)  # another one reads the same step
    assert later.steps[-2:] == [10, 12]


def test_a_resumed_run_goes_on_likewise(tmp_path):
    for updates in (0, 5):
        net, optimizer = parts()
        optimizer.global_step.set_data(Tensor([updates], ms.int32))
        monitor = TrainingMonitor(tmp_path / "run", resume=True, measure=StepOptions(activations=None))
        Model(nn.TrainOneStepCell(net, optimizer)).train(1, dataset(2), callbacks=[monitor], **LOOSE)
    assert instrument.read(tmp_path / "run")["grad/norm"].step.tolist() == [1, 2, 6, 7]


def test_a_step_of_an_unknown_class_is_left_alone_and_one_warning_says_so(told):
    memory = Memory()
    cell = Own(*parts())
    loop = Loop(TrainingMonitor(writers=[memory]), cell)
    loop.train([0.5])
    loop.train([0.25])
    [message] = told
    assert "Own; it is known how to measure in TrainOneStepCell" in message and "its loss is recorded" in message
    assert "measure=False" in message
    assert type(cell) is Own and memory.column("loss") == [0.5, 0.25] and memory.steps == [1, 2]
    told.clear()


@pytest.mark.compiles
def test_a_step_that_is_compiled_is_left_alone_and_trains_on(told):
    cell = nn.TrainOneStepCell(*parts())
    Model(cell).train(1, dataset(1), **LOOSE)
    memory = Memory()
    Model(cell).train(1, dataset(2), callbacks=[TrainingMonitor(writers=[memory])], **LOOSE)
    assert "compiled already" in told.pop() and not told
    assert memory.steps == [1, 2] and np.isfinite(memory.column("loss")).all()


def test_a_failure_in_making_it_measure_by_default_leaves_training_as_it_was(monkeypatch, told):
    monkeypatch.setattr(upgrade.UpgradedTrainOneStepCell, "prepare", lambda self, options: 1 / 0)
    memory = Memory()
    cell = nn.TrainOneStepCell(*parts())
    Loop(TrainingMonitor(writers=[memory]), cell).train([0.5])
    assert "ZeroDivisionError" in told.pop() and not told
    assert type(cell) is nn.TrainOneStepCell and memory.column("loss") == [0.5]


def test_an_option_that_cannot_work_is_an_error_before_training():
    monitor = TrainingMonitor(writers=[Memory()], measure=StepOptions(activations=["nothing like it"]))
    with pytest.raises(ValueError, match="Near names"):
        Loop(monitor, nn.TrainOneStepCell(*parts())).train([0.5])


def test_another_model_of_the_same_network_is_measured_as_the_first_was(mode, told):
    net = MLP()
    memories = [Memory(), Memory()]
    for memory in memories:
        model = Model(nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.25)))
        model.train(1, dataset(3), callbacks=[TrainingMonitor(writers=[memory])], **LOOSE)
    first, second = ({name for name in memory.records[-1].values if name.startswith(("activation", "grad", "weight"))}
                     for memory in memories)
    assert first == second and any(name.startswith("activation") for name in second) and told == []


def test_options_of_another_type_are_refused():
    with pytest.raises(TypeError, match="measure must be StepOptions, None for the default ones, or False, but it is 'le"):
        TrainingMonitor(writers=[Memory()], measure="leaves")


def test_options_for_a_step_that_measures_already_have_no_effect_and_that_is_told(told):
    step = InstrumentedStep(*parts(), activations=None)
    monitor = TrainingMonitor(writers=[Memory()], measure=StepOptions(counts=True))
    monitor.on_train_begin(Loop(monitor, step).context)
    monitor.close()
    assert "`measure` has no effect, since this InstrumentedStep measures already" in told.pop() and not told


def test_a_first_call_that_fails_says_how_to_do_without(mode, told):
    cell = upgrade.upgrade(nn.TrainOneStepCell(*parts()), StepOptions(activations=None))
    with pytest.raises(Exception):  # noqa: B017  (each release raises another one)
        cell(Tensor(np.ones((2, 3)), ms.float32), Tensor(np.ones(4), ms.float32))
    assert "measure=False" in told.pop() and not told
