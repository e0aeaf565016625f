"""TrainingMonitor: what is recorded, when, and that nothing of it stops training."""
import math

import mindspore as ms
import numpy as np
import orjson
import pytest
from mindspore import Tensor, nn
from mindspore import dataset as ds
from mindspore.train import Model
from mindspore.train.callback import LossMonitor, RunContext

from instrument import InstrumentedStep, TrainingMonitor
from instrument.background import name_of
from instrument.schema import Metric, Schema
from instrument.writers import JsonlWriter, Writer
from networks import MLP, mlp_batches


class Memory(Writer):
    """Keeps the records, and counts how often it was closed."""

    def __init__(self):
        self.records, self.closed = [], 0

    def write(self, record):
        self.records.append(record)

    def close(self):
        self.closed += 1

    def column(self, name):
        return [record.values.get(name) for record in self.records]

    @property
    def steps(self):
        return [record.step for record in self.records]


class Broken(Writer):
    """Raises at every call."""

    def write(self, record):
        raise OSError("disk full")

    def close(self):
        raise OSError("still full")


class FakeStep:
    """Stands for an InstrumentedStep where only the host's part is tested."""

    optimizer = None
    schema = Schema([Metric("step", "step", "global", "identical"), Metric("loss", "loss", "local", "mean")])


class Loop:
    """Calls a monitor's hooks as `Model.train` does, with outputs made by hand."""

    def __init__(self, monitor, network, new_hooks=True, old_hooks=False):
        self.monitor, self.new_hooks, self.old_hooks = monitor, new_hooks, old_hooks
        self.params = {"train_network": network, "cur_step_num": 0, "mode": "train"}
        self.context = RunContext(self.params)

    def call(self, name):
        if self.new_hooks:
            getattr(self.monitor, f"on_train_{name}")(self.context)
        if self.old_hooks:
            getattr(self.monitor, name)(self.context)

    def train(self, outputs):
        with self.monitor:
            self.params["cur_step_num"] = 0
            self.call("begin")
            self.call("epoch_begin")
            for output in outputs:
                self.params["cur_step_num"] += 1
                self.call("step_begin")
                self.params["net_outputs"] = output
                self.call("step_end")
            self.call("epoch_end")
            self.call("end")


def vectors(*steps):
    """Outputs of a step: (loss, stats) with a loss of ten times the number of the step."""
    return [(10.0 * step, np.array([step, 10.0 * step], np.float32)) for step in steps]


def dataset(steps):
    batches = mlp_batches(steps)
    return ds.NumpySlicesDataset(tuple(np.stack(part) for part in zip(*batches)), ["x", "y"], shuffle=False)


def lines_of(run):
    return [orjson.loads(line) for line in (run / "metrics-00000.jsonl").read_bytes().splitlines()]


# What a record holds

def test_a_run_of_the_real_step_is_recorded_whole(tmp_path, mode):
    net = MLP()
    step = InstrumentedStep(net, nn.SGD(net.trainable_params(), [0.5, 0.25, 0.125]), activations="leaves")
    memory = Memory()
    monitor = TrainingMonitor(tmp_path / "run", writers=[memory])
    Model(step).train(1, dataset(3), callbacks=[monitor], dataset_sink_mode=False)
    assert memory.steps == [1, 2, 3]
    assert memory.column("learning_rate") == [0.5, 0.25, 0.125]
    for record in memory.records:
        added = {name for name in record.values if not name.startswith("host/")} - set(step.schema.names)
        assert added == {"learning_rate", "step_time", "data_wait", "data_wait_fraction", "epoch"}
        assert set(step.schema.names) - set(record.values) == {"step"}
        assert all(map(math.isfinite, record.values.values()))
    assert lines_of(tmp_path / "run") == [{"step": r.step, "time": r.time, **r.values} for r in memory.records]
    assert len(list((tmp_path / "run").glob("events.out.tfevents.*"))) == 1
    schema = orjson.loads((tmp_path / "run" / "config.json").read_bytes())["schema"]
    assert [metric["name"] for metric in schema] == list(step.schema.names)


class TwoLosses(nn.Cell):
    """The MLP's loss, and half of it."""

    def __init__(self):
        super().__init__()
        self.net = MLP()

    def construct(self, x, y):
        loss = self.net(x, y)
        return {"total": loss, "half": loss * 0.5}


def test_parts_of_the_loss_and_the_clipping_are_in_the_config_of_the_run(tmp_path):
    net = TwoLosses()
    step = InstrumentedStep(net, nn.SGD(net.trainable_params(), 0.1), loss_key="total", max_grad_norm=0.5)
    Model(step).train(1, dataset(3), callbacks=[TrainingMonitor(tmp_path / "run")], dataset_sink_mode=False)
    config = orjson.loads((tmp_path / "run" / "config.json").read_bytes())
    assert "loss/half" in step.schema.names and [each["name"] for each in config["schema"]] == list(step.schema.names)
    assert config["max_grad_norm"] == 0.5


def test_a_plain_train_cell_gives_the_loss(mode):
    net = MLP()
    memory, losses = Memory(), []
    cell = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.25))
    monitor = TrainingMonitor(writers=[memory], measure=False)
    Model(cell).train(1, dataset(3), callbacks=[monitor], dataset_sink_mode=False)
    twin = MLP()
    cell = nn.TrainOneStepCell(twin, nn.SGD(twin.trainable_params(), 0.25))
    for batch in mlp_batches(3):
        losses.append(float(cell(*map(Tensor, batch)).asnumpy()))
    assert type(cell) is nn.TrainOneStepCell
    assert memory.steps == [1, 2, 3] and memory.column("loss") == losses
    assert not [name for record in memory.records for name in record.values if name.startswith(("grad", "weight"))]
    assert memory.column("epoch") == [1 / 3, 2 / 3, 1.0]
    assert all({"learning_rate", "step_time", "data_wait"} < set(record.values) for record in memory.records)


@pytest.mark.parametrize("output, loss", [
    (Tensor(0.5, ms.float32), 0.5), ((Tensor(0.5, ms.float32), Tensor(True)), 0.5), ([0.5, 1.0], 0.5),
    (Tensor([0.5], ms.float32), 0.5), (None, None), ((), None), (Tensor([1.0, 2.0], ms.float32), None),
    ({"a": 1.0}, None)])
def test_outputs_of_any_form_give_the_loss_or_leave_it_out(output, loss):
    memory = Memory()
    Loop(TrainingMonitor(writers=[memory], measure=False), nn.ReLU()).train([output])
    assert memory.column("loss") == [loss] and ("loss" in memory.records[0].values) == (loss is not None)


def test_the_step_is_found_inside_a_wrapper():
    class Wrapper(nn.Cell):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    net = MLP()
    memory = Memory()
    step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.5))
    step.schema = FakeStep.schema
    Loop(TrainingMonitor(writers=[memory]), Wrapper(Wrapper(step))).train(vectors(7))
    assert memory.steps == [7]
    assert memory.column("loss") == [70.0] and memory.column("learning_rate") == [0.5]


def test_an_overflow_step_has_the_rate_of_the_update_it_left_out():
    class Skipping(FakeStep):
        optimizer = nn.SGD(MLP().trainable_params(), [0.5, 0.25, 0.125])
        schema = Schema([*FakeStep.schema, Metric("skipped", "flag", "global", "identical")])

    Skipping.optimizer.global_step.set_data(Tensor([1], ms.int32))
    memory = Memory()
    Loop(TrainingMonitor(writers=[memory]), Skipping()).train([(0.0, [1.0, 0.0, 0.0]), (0.0, [2.0, 0.0, 1.0])])
    assert memory.column("learning_rate") == [0.5, 0.25]


def test_step_time_is_seconds_a_call_since_the_record_before(monkeypatch):
    class Clock:
        now = 100.0

    def steps():
        for output in vectors(1, 2, 3, 4):
            Clock.now += 4.0
            yield output

    monkeypatch.setattr("instrument.pace.time.perf_counter", lambda: Clock.now)
    monkeypatch.setattr("instrument.monitor.time.time", lambda: 1735387200.5)
    memory = Memory()
    Loop(TrainingMonitor(writers=[memory], every=2, batch_size=2), FakeStep()).train(steps())
    assert memory.column("step_time") == [4.0, 4.0] and memory.column("samples_per_second") == [0.5, 0.5]
    assert [record.time for record in memory.records] == [1735387200.5] * 2


# When a record is made

@pytest.mark.parametrize("new_hooks, old_hooks", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("network, outputs", [(FakeStep(), vectors(1, 2, 3)), (nn.ReLU(), [0.5, 0.5, 0.5])])
def test_old_new_and_both_hooks_record_each_step_once(new_hooks, old_hooks, network, outputs):
    memory = Memory()
    Loop(TrainingMonitor(writers=[memory], measure=False), network, new_hooks, old_hooks).train(outputs)
    assert memory.steps == [1, 2, 3]
    assert all(time > 0 for time in memory.column("step_time"))


def test_the_old_hooks_are_silent_in_evaluation():
    memory = Memory()
    loop = Loop(TrainingMonitor(writers=[memory]), FakeStep(), new_hooks=False, old_hooks=True)
    loop.params["mode"] = "eval"
    loop.train(vectors(1, 2))
    assert memory.steps == []


def test_a_measured_step_is_recorded_once_and_an_unmeasured_one_never():
    memory = Memory()
    Loop(TrainingMonitor(writers=[memory]), FakeStep()).train(vectors(0, 0, 1, 1, 1, 2, 2, 3))
    assert memory.steps == [1, 2, 3] and memory.column("loss") == [10.0, 20.0, 30.0]


def test_a_second_step_cell_starts_anew():
    memory = Memory()
    monitor = TrainingMonitor(writers=[memory])
    Loop(monitor, FakeStep()).train(vectors(1, 2))
    Loop(monitor, FakeStep()).train(vectors(0, 1, 2))
    assert memory.steps == [1, 2, 1, 2]


def test_accumulation_is_recorded_once_an_update():
    net = MLP()
    step = InstrumentedStep(net, nn.SGD(net.trainable_params(), 0.25), accumulate=2)
    memory = Memory()
    Model(step).train(1, dataset(6), callbacks=[TrainingMonitor(writers=[memory])], dataset_sink_mode=False)
    assert len(memory.steps) == 3 and sorted(set(memory.steps)) == memory.steps and memory.steps[0] > 0


@pytest.mark.parametrize("every, expected", [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (100, [5])])
def test_every_thins_the_records_and_keeps_the_last(every, expected):
    memory = Memory()
    Loop(TrainingMonitor(writers=[memory], every=every), FakeStep()).train(vectors(1, 2, 3, 4, 5))
    assert memory.steps == expected


def test_a_step_that_is_not_due_is_not_copied():
    class Copied:
        copies = 0

        def asnumpy(self):
            Copied.copies += 1
            return np.array([Copied.copies, 0.0], np.float32)

    Loop(TrainingMonitor(writers=[Memory()], every=3), FakeStep()).train([(0.0, Copied()) for _ in range(6)])
    assert Copied.copies == 2
    vector = Copied()  # what a step returns again that measures nothing is copied once
    Loop(TrainingMonitor(writers=[Memory()]), FakeStep()).train([(0.0, vector)] * 6)
    assert Copied.copies == 3


def test_all_rows_of_a_window_are_recorded_and_lost_ones_told():
    class Windowed(FakeStep):
        window = 2
        reads = [([[1.0, 10.0], [2.0, 20.0]], 0), ([[4.0, 40.0], [5.0, 50.0]], 1)]

        def read_window(self):
            return self.reads.pop(0)

    memory = Memory()
    monitor = TrainingMonitor(writers=[memory])
    with pytest.warns(UserWarning, match="1 measured steps were overwritten.*larger `window`"):
        Loop(monitor, Windowed()).train(vectors(2, 5))
    assert memory.steps == [1, 2, 4, 5] and memory.column("loss") == [10.0, 20.0, 40.0, 50.0]
    assert monitor.overwritten == 1 and "step_time" in memory.records[-1].values


def test_the_learning_rate_is_that_of_the_step():
    net = MLP()
    rates = [0.001 * i for i in range(1, 13)]
    step = InstrumentedStep(net, nn.SGD(net.trainable_params(), rates), every=2)
    memory = Memory()
    Model(step).train(1, dataset(12), callbacks=[TrainingMonitor(writers=[memory], every=3)], dataset_sink_mode=False)
    assert memory.steps == [2, 6, 8, 12]  # read after the calls 3, 6, 9 and 12
    assert memory.column("learning_rate") == [pytest.approx(0.001 * step) for step in memory.steps]


def test_every_kth_step_is_recorded_once():
    net = MLP()
    for options in ({}, {"window": 8}):
        step = InstrumentedStep(net, nn.SGD(net.trainable_params(), 0.25), every=3, **options)
        memory = Memory()
        Model(step).train(1, dataset(8), callbacks=[TrainingMonitor(writers=[memory])], dataset_sink_mode=False)
        assert memory.steps == [1, 3, 6]
        step.remove_taps()


def test_several_calls_of_train_continue_the_numbers_of_a_plain_cell():
    memory = Memory()
    loop = Loop(TrainingMonitor(writers=[memory], measure=False), nn.ReLU())
    loop.train([0.5, 0.5])
    loop.train([0.5, 0.5])
    assert memory.steps == [1, 2, 3, 4]


def test_no_tensor_is_kept_after_the_step():
    class Stats(np.ndarray):
        """Can be referred to weakly."""

    import gc
    import weakref
    monitor = TrainingMonitor(writers=[Memory()])
    loop = Loop(monitor, FakeStep())
    stats = np.array([1.0, 2.0], np.float32).view(Stats)
    reference = weakref.ref(stats)
    loop.train([(0.0, stats)])
    loop.params.clear()
    del stats
    gc.collect()
    assert reference() is None


# Nothing stops training

def test_a_writer_that_raises_is_reported_once_and_counted():
    memory = Memory()
    monitor = TrainingMonitor(writers=[Broken(), memory])
    with pytest.warns(UserWarning, match="Broken failed: OSError: disk full. Training goes on") as caught:
        Loop(monitor, FakeStep()).train(vectors(1, 2, 3))
    assert len(caught) == 1
    assert memory.steps == [1, 2, 3]
    assert monitor.errors["Broken"] >= 4  # three records, and closing


def test_an_error_of_our_own_is_reported_once_and_training_goes_on():
    memory = Memory()
    monitor = TrainingMonitor(writers=[memory])
    with pytest.warns(UserWarning, match="TrainingMonitor failed: ValueError: the step returned a vector") as caught:
        Loop(monitor, FakeStep()).train([(0.0, [1.0]), (0.0, [2.0]), *vectors(3)])
    assert len(caught) == 1 and memory.steps == [3] and monitor.errors == {"TrainingMonitor": 2}


def test_an_unreadable_learning_rate_leaves_the_other_numbers():
    class Unreadable(FakeStep):
        class optimizer:
            learning_rate = 0.5
            dynamic_lr = True  # but nothing to evaluate, and no global_step

    memory = Memory()
    with pytest.warns(UserWarning, match="learning_rate failed: AttributeError"):
        Loop(TrainingMonitor(writers=[memory]), Unreadable()).train(vectors(1, 2))
    assert memory.column("loss") == [10.0, 20.0] and memory.column("learning_rate") == [None, None]


def test_an_exception_in_training_passes_and_closes_the_writers(tmp_path):
    def fail():
        yield from vectors(1, 2)
        raise KeyboardInterrupt

    memory = Memory()
    with pytest.raises(KeyboardInterrupt):
        Loop(TrainingMonitor(writers=[memory]), FakeStep()).train(fail())
    assert memory.steps == [1, 2] and memory.closed == 1


def test_model_closes_the_writers_when_another_callback_raises():
    class Failing(LossMonitor):
        def on_train_step_end(self, run_context):
            if run_context.original_args().cur_step_num == 2:
                raise RuntimeError("as asked")

    net = MLP()
    memory = Memory()
    with pytest.raises(RuntimeError, match="as asked"):
        Model(nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.25))).train(
            1, dataset(4), callbacks=[TrainingMonitor(writers=[memory]), Failing()], dataset_sink_mode=False)
    assert memory.steps == [1, 2] and memory.closed == 1


def test_fit_with_evaluation_records_the_training_steps_and_closes_at_the_end():
    class Watching(Memory):
        """Notes how many records there were when it was closed."""

        def close(self):
            super().close()
            self.records_at_close = len(self.records)

    net = nn.Dense(16, 4)
    memory = Watching()
    model = Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.01), metrics={"mse"})
    model.fit(2, dataset(3), dataset(2), callbacks=[TrainingMonitor(writers=[memory])], dataset_sink_mode=False,
              valid_dataset_sink_mode=False)
    assert memory.steps == [1, 2, 3, 3, 4, 5, 6, 6]
    validated = [record for record in memory.records if "val/mse" in record.values]
    assert [record.step for record in validated] == [3, 6] and all("val/loss" in record.values for record in validated)
    assert not any("loss" in record.values for record in validated)
    assert memory.records_at_close == 8 and memory.closed == 1


# Arguments

def test_a_second_run_on_one_name_takes_the_next_free_one(tmp_path, capsys):
    first = TrainingMonitor(tmp_path / "run")
    assert capsys.readouterr().out == ""
    second = TrainingMonitor(tmp_path / "run")
    assert first.run_dir == tmp_path / "run" and second.run_dir == tmp_path / "run-2"
    assert "run holds a run already: this one goes to" in capsys.readouterr().out


def test_writers_join_those_of_the_run_directory(tmp_path):
    def function(record):
        pass

    monitor = TrainingMonitor(tmp_path, writers=[Memory(), function])
    assert [name_of(writer) for writer in monitor.writers] \
        == ["JsonlWriter", "TensorBoardWriter", "AlarmPrinter", "Memory", "function"]


@pytest.mark.parametrize("name", ["every", "batch_size", "queue_size"])
@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_numbers_must_be_positive_and_whole(name, number):
    with pytest.raises(ValueError, match=f"{name} must be a positive whole number, but it is {number!r}"):
        TrainingMonitor(writers=[Memory()], **{name: number})


@pytest.mark.parametrize("arguments, error, message", [
    ({"tokens_per_sample": 4}, ValueError, "tokens_per_sample needs batch_size"),
    ({"when_full": "block"}, ValueError, "when_full must be"),
    ({"alarms": ["NonFinite"]}, TypeError, "`alarms` must hold instances")])
def test_arguments_that_cannot_work_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        TrainingMonitor(writers=[Memory()], **arguments)


def test_a_monitor_needs_somewhere_to_write():
    with pytest.raises(ValueError, match="run_dir, writers, or both"):
        TrainingMonitor(writers=[])


def test_a_writer_must_be_a_writer(tmp_path):
    with pytest.raises(TypeError, match="a writer must be a Writer, .*JsonlWriter"):
        TrainingMonitor(tmp_path / "run", writers=[JsonlWriter])
    assert not (tmp_path / "run").exists()
