"""A training loop of the user's own, by `TrainingMonitor.loop`: what is recorded, stopped, evaluated, and said."""
import time

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import instrument
from instrument import InstrumentedStep, NormStats, TrainingMonitor, runs
from instrument.alarms import Alarm, AlarmRaised, Finding
from networks import MLP, mlp_batches
from test_monitor import Memory


class At(Alarm):
    """An incident at one step."""

    def __init__(self, step, policy):
        super().__init__(policy=policy)
        self.step = step

    def check(self, record):
        return Finding("now", "loss", record.values["loss"]) if record.step == self.step else None


def counted():
    """A step without MindSpore: returns (loss, stats) with a loss of ten times the number of its call."""
    calls = []

    def step(value):
        calls.append(value)
        return Tensor(10.0 * len(calls), ms.float32), np.array([value], np.float32)
    return step


SCHEMA = instrument.Schema([instrument.Metric("grad/norm", "1", "global", "identical")])


def test_an_instrumented_step_is_recorded_as_by_model_train(tmp_path):
    network = MLP()
    step = InstrumentedStep(network, nn.Momentum(network.trainable_params(), 0.01, 0.9), activations=None)
    made = []
    with TrainingMonitor(tmp_path / "run", batch_size=8).loop(step, epochs=2, steps_per_epoch=3) as train_step:
        for _ in range(2):
            for batch in mlp_batches(3):
                loss, stats = train_step(*map(Tensor, batch))
                made.append((float(loss), step.schema.unpack(stats)))
    run = instrument.read(tmp_path / "run")
    assert run["loss"].step.tolist() == [1, 2, 3, 4, 5, 6] and run["loss"].value.tolist() == [loss for loss, _ in made]
    for name, value in made[-1][1].items():
        if name not in ("step", "loss"):
            assert run[name].value[-1] == value
    assert run["epoch"].value == pytest.approx(np.arange(1, 7) / 3)
    assert set(run["learning_rate"].value) == {np.float32(0.01)} and len(run["step_time"].step) == 6
    assert run.config["total_steps"] == 6 and runs.read_summary(tmp_path / "run")["status"] == "finished"


def test_a_stock_step_is_made_to_measure(tmp_path):
    network = MLP()
    with TrainingMonitor(tmp_path / "run").loop(nn.TrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.1))) as step:
        losses = [float(step(*map(Tensor, batch))) for batch in mlp_batches(3)]
    run = instrument.read(tmp_path / "run")
    assert run["loss"].value.tolist() == losses and len(run["grad/norm"].step) == 3


def test_a_function_with_norms_gets_numbers_loss_and_learning_rate(tmp_path):
    network = MLP()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    norm_stats = NormStats(optimizer.parameters)
    loss_and_gradients = ms.value_and_grad(network, None, optimizer.parameters)
    made = []

    def step(x, y):
        loss, gradients = loss_and_gradients(x, y)
        stats = norm_stats(gradients)
        optimizer(ops.clip_by_global_norm(gradients, 1.0))
        return loss, stats

    def train(steps, **options):
        monitor = TrainingMonitor(tmp_path / "run", **options)
        with monitor.loop(step, schema=norm_stats.schema, optimizer=optimizer) as train_step:
            for batch in mlp_batches(steps):
                loss, stats = train_step(*map(Tensor, batch))
                made.append((float(loss), norm_stats.schema.unpack(stats)))
        assert not monitor.errors

    train(3)
    train(2, resume=True)
    run = instrument.read(tmp_path / "run")
    assert run["loss"].step.tolist() == [1, 2, 3, 4, 5] and run["loss"].value.tolist() == [loss for loss, _ in made]
    for name in norm_stats.schema.names:
        assert run[name].value.tolist() == [values[name] for _, values in made]
    assert set(run["learning_rate"].value) == {np.float32(0.1)}
    scopes = {metric["name"]: metric["scope"] for metric in run.config["schema"]}
    assert list(scopes)[:3] == ["step", "loss", "grad/norm"] and scopes["grad/norm/first.weight"] == "global"


@pytest.mark.parametrize("policy", ["stop", "raise"])
def test_an_alarm_ends_it(policy):
    memory, made = Memory(), []
    try:
        with TrainingMonitor(writers=[memory], alarms=[At(3, policy)]).loop(counted(), schema=SCHEMA) as train_step:
            for i in range(10):
                train_step(i)
                made.append(i)
                if train_step.should_stop:
                    break
    except AlarmRaised:
        assert policy == "raise"
    assert made == [0, 1, 2, 3][:4 if policy == "stop" else 3]  # step 3 is looked at once step 4 has been started
    assert [record.step for record in memory.records if record.has_training] == [1, 2, 3, 4]


def test_evaluation_is_left_out_of_the_time_and_recorded():
    memory = Memory()
    with TrainingMonitor(writers=[memory], alarms=[]).loop(counted(), schema=SCHEMA) as train_step:
        for i in range(4):
            train_step(i)
            time.sleep(0.02)
            if i == 1:
                with train_step.evaluation() as results:
                    time.sleep(0.5)
                    results["accuracy"] = np.float32(0.25)
    values = {record.step: record.values for record in memory.records if record.has_training}
    assert all(0.015 < values[step]["data_wait"] < 0.3 for step in (2, 3, 4))
    [validation] = [record for record in memory.records if "val/accuracy" in record.values]
    assert validation.step == 2 and validation.values["val/accuracy"] == 0.25


def test_an_error_in_the_loop_is_the_users_and_nothing_recorded_is_lost(tmp_path):
    with pytest.raises(ZeroDivisionError):
        with TrainingMonitor(tmp_path / "run").loop(counted(), schema=SCHEMA) as train_step:
            for i in range(3):
                train_step(i)
            1 / 0  # noqa: B018
    run = instrument.read(tmp_path / "run")
    assert run["grad/norm"].value.tolist() == [0, 1, 2]
    assert runs.read_summary(tmp_path / "run")["status"].startswith("failed: ZeroDivisionError")


def test_what_returns_the_loss_alone_says_so(told):
    memory = Memory()
    with TrainingMonitor(writers=[memory], alarms=[]).loop(lambda x: Tensor(x, ms.float32)) as train_step:
        train_step(2.0)
    assert memory.records[0].values["loss"] == 2
    [message] = told
    told.clear()
    assert "only the loss can be recorded" in message and "give `schema`" in message


@pytest.mark.parametrize("outputs, found", [
    (1.0, "it returned float"), ((np.ones(1), Tensor(1.0, ms.float32)), r"of shapes (1,) and ()"),  # the other way round
    ((1.0, np.ones(2)), "a vector of shape (1,), and it returned two of shapes () and (2,)"),
    ((np.ones(4), np.ones(1)), "of shapes (4,) and (1,)")])
def test_a_vector_that_cannot_be_one_is_left_out_and_told_of(outputs, found, told):
    memory = Memory()
    with TrainingMonitor(writers=[memory], alarms=[], batch_size=4).loop(lambda: outputs, schema=SCHEMA) as train_step:
        made = [train_step() for _ in range(3)]
    assert all(each is outputs for each in made) and memory.steps == [1, 2, 3]
    assert all("grad/norm" not in values.values and "step_time" in values.values for values in memory.records)
    [message] = told
    told.clear()
    assert found in message and "has to return (loss, stats)" in message


def test_a_function_may_measure_now_and_then():
    memory, norms = Memory(), np.ones(1, np.float32)

    def step(value):
        norms[0] = value  # one buffer for all: it is copied
        return float(value), norms if value % 2 == 0 else None

    with TrainingMonitor(writers=[memory], alarms=[]).loop(step, schema=SCHEMA) as train_step:
        for value in (1, 2, 3, 4):
            train_step(value)
    assert memory.steps == memory.column("loss") == [1, 2, 3, 4] and memory.column("grad/norm") == [None, 2, None, 4]


def test_loops_of_one_monitor_go_on_with_the_numbers(tmp_path):
    monitor = TrainingMonitor(tmp_path / "run", alarms=[At(2, "stop")])
    step = counted()
    for _ in range(2):
        with monitor.loop(step, schema=SCHEMA) as train_step:
            for i in range(3):
                train_step(i)
    assert train_step.should_stop is False
    with train_step:
        train_step(9)
    run = instrument.read(tmp_path / "run")
    assert run["loss"].step.tolist() == list(range(1, 8)) and run["loss"].value.tolist() == [10.0 * i for i in range(1, 8)]


def accumulating(optimizer, norm_stats, network, calls):
    """A step of which each fourth call makes an update."""
    loss_and_gradients = ms.value_and_grad(network, None, optimizer.parameters)

    def step(x, y):
        loss, gradients = loss_and_gradients(x, y)
        calls.append(1)
        if len(calls) % 4 == 0:
            optimizer(gradients)
        return loss, norm_stats(gradients)
    return step


def test_a_function_that_accumulates_has_the_rate_of_the_last_update_and_resumes(tmp_path):
    calls = []
    for run in range(2):
        network = MLP()
        optimizer = nn.SGD(network.trainable_params(), [0.01 * (i + 1) for i in range(8)])
        if run:
            optimizer.global_step.set_data(Tensor([4], ms.int32))  # as the checkpoint has it
        norm_stats = NormStats(optimizer.parameters)
        step = accumulating(optimizer, norm_stats, network, calls)
        monitor = TrainingMonitor(tmp_path / "run", resume=True, alarms=[])
        with monitor.loop(step, schema=norm_stats.schema, optimizer=optimizer, accumulate=4) as train_step:
            for batch in mlp_batches(16 if run == 0 else 4):
                train_step(*map(Tensor, batch))
        assert not monitor.errors
    made = instrument.read(tmp_path / "run")
    assert made["loss"].step.tolist() == list(range(1, 21))
    updates = [max(i // 4, 1) for i in range(1, 21)]
    assert made["learning_rate"].value == pytest.approx([0.01 * each for each in updates], rel=1e-6)


def test_outside_of_its_block_a_loop_records_nothing_and_says_so(told):
    memory = Memory()
    train_step = TrainingMonitor(writers=[memory], alarms=[]).loop(counted(), schema=SCHEMA)
    assert float(train_step(1)[0]) == 10
    with train_step:
        train_step(2)
    train_step(3)
    assert memory.steps == [1] and memory.column("loss") == [20]
    first, second = told
    told.clear()
    assert "what is called without it is not" in first and "inside of its `with` block" in second


def test_a_loop_that_cannot_begin_leaves_the_monitor_closed():
    class Refuses(TrainingMonitor):
        def on_train_epoch_begin(self, run_context):
            raise KeyError("no")

    memory = Memory()
    monitor = Refuses(writers=[memory], alarms=[])
    with pytest.raises(KeyError), monitor.loop(counted(), schema=SCHEMA):
        pass
    assert memory.closed == 1


def test_an_alarm_that_raises_at_the_end_is_how_the_run_ended(tmp_path):
    with pytest.raises(AlarmRaised):
        with TrainingMonitor(tmp_path / "run", alarms=[At(2, "raise")]).loop(counted(), schema=SCHEMA) as train_step:
            train_step(1)
            train_step(2)
    assert runs.read_summary(tmp_path / "run")["status"].startswith("failed: AlarmRaised: At at step 2")


def test_results_of_an_evaluation(told):
    memory = Memory()
    with TrainingMonitor(writers=[memory], alarms=[At(1, "raise")]).loop(counted(), schema=SCHEMA) as train_step:
        train_step(1)
        with pytest.raises(ZeroDivisionError), train_step.evaluation() as results:  # and not AlarmRaised
            results["half"] = 1.0
            1 / 0  # noqa: B018
        train_step(2)
        with train_step.evaluation() as results:
            results.update({"val/top5": Tensor(0.5, ms.float32), "list": np.ones(3), "text": "abc"})
    [validation] = [record.values for record in memory.records if any(name.startswith("val/") for name in record.values)]
    assert validation == {"val/top5": 0.5}
    [message] = told
    told.clear()
    assert "'list', 'text' is left out" in message


@pytest.mark.parametrize("arguments, error, message", [
    ({"step": 3}, TypeError, "`step` must be a training step"), ({"schema": {}}, TypeError, "norm_stats.schema"),
    ({"epochs": 0}, ValueError, "`epochs` must be a whole"), ({"steps_per_epoch": True}, ValueError, "`steps_per_epoch`"),
    ({"accumulate": 0}, ValueError, "`accumulate` must be a whole"),
    ({"schema": instrument.Schema([instrument.Metric("step", "step", "global", "identical")])}, ValueError, "give that step")])
def test_arguments_that_cannot_work_are_refused(arguments, error, message):
    given = {"step": counted(), "schema": SCHEMA, **arguments}
    with pytest.raises(error, match=message):
        TrainingMonitor(writers=[Memory()]).loop(**given)


def test_a_step_with_a_schema_needs_no_other():
    network = MLP()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1), activations=None)
    with pytest.raises(ValueError, match="has a schema of its own"):
        TrainingMonitor(writers=[Memory()]).loop(step, schema=SCHEMA)


def test_a_monitor_whose_hooks_nobody_calls_says_so(told):
    with TrainingMonitor(writers=[Memory()]):
        pass
    [message] = told
    told.clear()
    assert "has recorded nothing" in message and "monitor.loop(step)" in message


def test_a_context_without_a_train_network_is_told_of(told):
    from mindspore.train.callback import RunContext
    memory = Memory()
    params = {"cur_step_num": 0, "mode": "train"}
    context = RunContext(params)
    with TrainingMonitor(writers=[memory], alarms=[]) as monitor:
        monitor.on_train_begin(context)
        params.update(cur_step_num=1, net_outputs=(1.0, np.ones(3)))
        monitor.on_train_step_end(context)
        monitor.on_train_end(context)
    assert memory.records[0].values["loss"] == 1
    [message] = told
    told.clear()
    assert "no `train_network`" in message and "monitor.loop(step)" in message
