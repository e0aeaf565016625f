"""TrainingMonitor over whole runs: alarms that act, resume, signals, other callbacks, ranks, and what the files then hold."""
import math
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import mindspore as ms
import numpy as np
import orjson
import pytest
from mindspore import Tensor, nn
from mindspore.train import Model
from mindspore.train.callback import CheckpointConfig, LossMonitor, ModelCheckpoint, TimeMonitor

import instrument
from instrument import InstrumentedStep, TrainingMonitor, _compat
from instrument.alarms import Alarm, AlarmRaised, Finding, LossSpike, NonFinite, UpdateRatio
from instrument.bins import CARRIED
from instrument.place import Place
from instrument.samples import TextSampler
from networks import MLP
from test_monitor import FakeStep, Loop, Memory, dataset, vectors

ROOT = Path(__file__).parents[1]
NAN = (math.nan, np.array([3.0, math.nan], np.float32))


def summary(run):
    return orjson.loads((run / "summary.json").read_bytes())


# Alarms

def test_an_incident_is_in_every_file_once_with_its_length(tmp_path, capsys):
    memory = Memory()
    monitor = TrainingMonitor(tmp_path / "run", writers=[memory], alarms=[NonFinite()])
    bad = [(0.0, np.array([step, math.nan], np.float32)) for step in (3, 4, 5)]
    Loop(monitor, FakeStep()).train([*vectors(1, 2), *bad, *vectors(*range(6, 20))])
    incidents = [(record.step, each) for record in memory.records for each in record.alarms]
    assert [(each.state, each.first_step, each.last_step, each.steps) for _, each in incidents] \
        == [("begin", 3, 3, 1), ("end", 3, 5, 3)]
    assert incidents[0][0] == 3
    assert [each["state"] for each in instrument.read(tmp_path / "run").alarms] == ["begin", "end"]
    assert capsys.readouterr().err.count("NonFinite at step 3: loss is nan") == 1


def test_an_incident_that_is_open_at_the_end_is_told_so(tmp_path):
    monitor = TrainingMonitor(tmp_path / "run", alarms=[NonFinite(policy=lambda incident: None), LossSpike()])
    Loop(monitor, FakeStep()).train([*vectors(1, 2), NAN])
    assert [(each["state"], each["steps"]) for each in instrument.read(tmp_path / "run").alarms] == [("begin", 1), ("open", 1)]


def test_policy_stop_ends_training_and_is_the_status(tmp_path):
    monitor = TrainingMonitor(tmp_path / "run", alarms=[NonFinite(policy="stop")])
    loop = Loop(monitor, FakeStep())
    loop.train([*vectors(1, 2), NAN, *vectors(4)])
    assert loop.context.get_stop_requested()
    assert summary(tmp_path / "run")["status"].startswith("stopped: NonFinite at step 3")


def test_each_training_of_a_monitor_is_stopped_by_what_is_bad_in_it(tmp_path):
    monitor = TrainingMonitor(tmp_path / "run", alarms=[NonFinite(policy="stop")])
    loop = Loop(monitor, FakeStep())
    for first in (1, 11):  # the second one begins within `quiet` records of the first one's end
        loop.context._stop_requested = False
        nan = (math.nan, np.array([first + 1, math.nan], np.float32))
        loop.train([*vectors(first), nan, *vectors(first + 2)])
        assert loop.context.get_stop_requested()
    assert [each["state"] for each in instrument.read(tmp_path / "run").alarms].count("begin") == 2


def test_a_policy_that_raises_comes_after_the_others():
    called = []
    monitor = TrainingMonitor(writers=[Memory()], alarms=[NonFinite(policy="raise", name="first"),
                                                          NonFinite(policy=called.append, name="second")])
    with pytest.raises(AlarmRaised, match="first at step 2"):
        Loop(monitor, FakeStep()).train([*vectors(1), (math.nan, np.array([2, math.nan], np.float32)), *vectors(3)])
    assert [incident.alarm for incident in called] == ["second"]


def test_policy_raise_names_the_layer_and_loses_nothing(tmp_path):
    class Poisoned(ms.train.callback.Callback):
        def on_train_step_begin(self, run_context):
            if run_context.original_args().cur_step_num == 3:
                net.second.bias.set_data(Tensor(np.full(net.second.bias.shape, np.inf), ms.float32))

    net = MLP()
    step = InstrumentedStep(net, nn.SGD(net.trainable_params(), 0.25), activations="leaves")
    monitor = TrainingMonitor(tmp_path / "run", alarms=[NonFinite(policy="raise")])
    with pytest.raises(AlarmRaised, match=r"NonFinite at step 3.*weight second.bias"):
        Model(step).train(1, dataset(8), callbacks=[monitor, Poisoned()], dataset_sink_mode=False)
    run = instrument.read(tmp_path / "run")
    assert run["grad/norm"].step.tolist()[:3] == [1, 2, 3] and run.alarms[0]["where"] == "second.bias"
    assert summary(tmp_path / "run")["status"].startswith("failed: AlarmRaised")


def test_a_policy_may_be_a_function_and_its_error_stays_with_it():
    seen = []

    def act(incident):
        seen.append(incident)
        raise RuntimeError("no pager")

    monitor = TrainingMonitor(writers=[Memory()], alarms=[NonFinite(policy=act)])
    with pytest.warns(UserWarning, match="NonFinite's policy failed: RuntimeError: no pager"):
        Loop(monitor, FakeStep()).train([*vectors(1, 2), NAN, *vectors(4)])
    assert [incident.first_step for incident in seen] == [3] and monitor.errors == {"NonFinite's policy": 1}


@pytest.mark.parametrize("policy", ["log", "stop"])
def test_an_alarm_that_fails_is_reported_once_and_the_others_look_on(policy):
    class Failing(Alarm):
        def check(self, record):
            raise ZeroDivisionError("of mine")

    memory = Memory()
    monitor = TrainingMonitor(writers=[memory], alarms=[Failing(policy=policy), NonFinite(policy=policy)])
    with pytest.warns(UserWarning, match="Failing failed: ZeroDivisionError: of mine"):
        Loop(monitor, FakeStep()).train([*vectors(1, 2), NAN])
    assert monitor.errors["Failing"] == 3 and [each.alarm for each in memory.records[2].alarms] == ["NonFinite"]


def test_an_alarm_without_its_metrics_is_told_at_once():
    monitor = TrainingMonitor(writers=[Memory()], alarms=[UpdateRatio()])
    with pytest.warns(UserWarning, match="UpdateRatio has nothing to look at.*update/ratio"):
        Loop(monitor, FakeStep()).train(vectors(1))


def test_an_incident_asks_for_a_measurement_of_the_next_step():
    class Sparse(FakeStep):
        every = 10
        asked = 0

        def measure_next(self):
            Sparse.asked += 1

    class Always(Alarm):
        def check(self, record):
            return Finding("always")

    Loop(TrainingMonitor(writers=[Memory()], alarms=[Always(policy=lambda incident: None)]), Sparse()).train(vectors(1, 2))
    assert Sparse.asked == 1


# Text samples

def test_text_is_sampled_every_so_many_steps_and_at_the_end(tmp_path):
    monitor = TrainingMonitor(tmp_path / "run", text_samples=TextSampler(str.upper, ["a", "b"], 2))
    Loop(monitor, FakeStep()).train(vectors(1, 2, 3, 4, 5))
    texts = [(each["step"], each["name"], each["text"]) for each in instrument.read(tmp_path / "run").texts]
    assert texts == [(step, f"sample/{i}", "AB"[i]) for step in (2, 4, 5) for i in (0, 1)]


def test_an_error_of_the_users_function_stays_with_it():
    memory = Memory()
    monitor = TrainingMonitor(writers=[memory], text_samples=TextSampler(lambda prompt: 1 / 0, ["a"], 1))
    with pytest.warns(UserWarning, match="TextSampler failed: ZeroDivisionError"):
        Loop(monitor, FakeStep()).train(vectors(1, 2))
    assert memory.steps == [1, 2] and monitor.errors["TextSampler"] == 3


# Resume

def test_a_resumed_run_goes_on_with_the_steps_of_the_checkpoint(tmp_path):
    def train(steps, load=None):
        net = MLP()
        optimizer = nn.Adam(net.trainable_params(), [0.01 * i for i in range(1, 21)])
        step = InstrumentedStep(net, optimizer, activations=None)
        if load is not None:
            ms.load_param_into_net(step, load)
        monitor = TrainingMonitor(tmp_path / "run", resume=True, hyper_parameters={"width": 16})
        Model(step).train(1, dataset(steps), callbacks=[monitor], dataset_sink_mode=False)
        ms.save_checkpoint(step, str(tmp_path / f"{steps}.ckpt"))

    train(4)
    train(7)  # without a checkpoint: after what was recorded
    train(3, ms.load_checkpoint(str(tmp_path / "4.ckpt")))
    run = instrument.read(tmp_path / "run")
    assert run["loss"].step.tolist() == [1, 2, 3, 4, 5, 6, 7]
    np.testing.assert_allclose(run["learning_rate"].value, 0.01 * np.arange(1, 8), rtol=1e-6)
    assert len(run.config["resumes"]) == 2 and run.config["hyper_parameters"] == {"width": 16}
    lines = [orjson.loads(line) for line in (tmp_path / "run" / "metrics-00000.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines if "resumed" in line] == [4, 4]


def test_another_rank_goes_on_after_the_same_step_before_it_has_found_the_run(tmp_path):
    def place(rank, resume=True):
        return Place(tmp_path / "run", resume=resume, config={}, rank=rank, ranks=2)

    assert place(1).resumed_after() is None  # there is no run yet
    first = place(0)
    assert first.resumed_after() is None
    first.run.close()
    (tmp_path / "run" / "metrics-00000.jsonl").write_text('{"step": 7, "time": 1.0, "loss": 0.5}\n')
    other = place(1)
    assert other.run is None and other.resumed_after() == 7 and other.resumed_after() is None
    assert place(1, resume=False).resumed_after() is None
    assert place(0).resumed_after() == 7


def test_a_resumed_plain_cell_goes_on_likewise(tmp_path):
    for updates in (0, 5):
        net = MLP()
        optimizer = nn.SGD(net.trainable_params(), 0.25)
        optimizer.global_step.set_data(Tensor([updates], ms.int32))
        monitor = TrainingMonitor(tmp_path / "run", resume=True, measure=False)
        Loop(monitor, nn.TrainOneStepCell(net, optimizer)).train([0.5, 0.5])
    assert instrument.read(tmp_path / "run")["loss"].step.tolist() == [1, 2, 6, 7]


def test_a_run_in_use_cannot_be_resumed(tmp_path):
    first = TrainingMonitor(tmp_path / "run")
    with pytest.raises(FileExistsError, match=str(os.getpid())):
        TrainingMonitor(tmp_path / "run", resume=True)
    first.on_train_begin(Loop(first, FakeStep()).context)
    first.close()
    TrainingMonitor(tmp_path / "run", resume=True)


def test_the_run_says_how_many_steps_it_will_have(tmp_path):
    def total():
        return orjson.loads((tmp_path / "run" / "config.json").read_bytes()).get("total_steps")

    network = nn.ReLU()
    monitor = TrainingMonitor(tmp_path / "run", measure=False)
    loop = Loop(monitor, network)
    loop.train([0.5, 0.5])  # a loop that does not say how long it is
    assert total() is None
    loop.params.update(epoch_num=3, batch_num=2)
    loop.train([0.5] * 6)
    assert total() == 8
    step = FakeStep()
    step.step_count, step.accumulate = Tensor(10, ms.int32), 2
    loop.params["train_network"] = step
    loop.train(vectors(11, 12, 13))
    assert total() == 13


# The end

def test_the_summary_says_how_the_run_ended(tmp_path):
    class Failing(Memory):
        def write(self, record):
            raise OSError("disk full")

    monitor = TrainingMonitor(tmp_path / "run", writers=[Failing()])
    with pytest.warns(UserWarning, match="disk full"):
        Loop(monitor, FakeStep()).train(vectors(1, 2, 3))
    assert summary(tmp_path / "run") == {"status": "finished", "last_step": 3, "records": 3, "dropped": 0, "overwritten": 0,
                                         "errors": {"Failing": 3}, "given_up": []}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.compiles
def test_a_signal_in_a_real_run_loses_nothing(tmp_path, number):
    # The child's own steps are the reference: what it had done by the hook in which the signal came.
    code = f"""
import os, signal, sys
import mindspore as ms
from mindspore import nn
from mindspore.train import Model
from mindspore.train.callback import Callback
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from instrument import InstrumentedStep, TrainingMonitor
from networks import MLP
from test_monitor import dataset

class Ending(Callback):
    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 5:
            os.kill(os.getpid(), {int(number)})

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
net = MLP()
step = InstrumentedStep(net, nn.SGD(net.trainable_params(), 0.25), activations=None)
Model(step).train(1, dataset(5000), callbacks=[TrainingMonitor({str(tmp_path / "run")!r}), Ending()], dataset_sink_mode=False)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0, done.stdout + done.stderr
    steps = instrument.read(tmp_path / "run")["loss"].step
    assert 5 <= len(steps) < 5000 and steps.tolist() == list(range(1, len(steps) + 1))
    status = summary(tmp_path / "run")["status"]
    # MindSpore ends a process at SIGINT by SIGTERM, or raises KeyboardInterrupt (2.0.0).
    assert "SIGTERM" in status or "KeyboardInterrupt" in status
    (events,) = (tmp_path / "run").glob("events.out.tfevents.*")
    assert events.stat().st_size > 500


# Beside others

@pytest.mark.compiles
def test_it_works_beside_mindspores_own_callbacks(tmp_path, capsys):
    net = MLP()
    step = InstrumentedStep(net, nn.SGD(net.trainable_params(), 0.25), activations=None)
    callbacks = [LossMonitor(), TrainingMonitor(tmp_path / "run"), TimeMonitor(1),
                 ModelCheckpoint("net", str(tmp_path / "checkpoints"), CheckpointConfig(save_checkpoint_steps=2))]
    Model(step).train(2, dataset(4), callbacks=callbacks, dataset_sink_mode=False)
    assert instrument.read(tmp_path / "run")["loss"].step.tolist() == [*range(1, 9)]
    assert list((tmp_path / "checkpoints").glob("*.ckpt"))
    assert capsys.readouterr().out.count("loss is") == 8


@pytest.mark.compiles
@pytest.mark.skipif(_compat.RELEASE.release < (2, 10), reason="SummaryCollector fails with protobuf 7 on older releases")
def test_it_works_beside_the_summary_collector(tmp_path):
    # Its worker process imports the main module anew, so the run is a program of its own.
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import mindspore as ms
from mindspore import nn
from mindspore.train import Model, SummaryCollector
from instrument import InstrumentedStep, TrainingMonitor
from networks import MLP
from test_monitor import dataset

if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    net = MLP()
    step = InstrumentedStep(net, nn.SGD(net.trainable_params(), 0.25), activations=None)
    collector = SummaryCollector({str(tmp_path / "summaries")!r}, collect_freq=1)
    monitor = TrainingMonitor({str(tmp_path / "run")!r})
    Model(step).train(1, dataset(4), callbacks=[collector, monitor], dataset_sink_mode=False)
    assert not monitor.errors, monitor.errors
""")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert instrument.read(tmp_path / "run")["loss"].step.tolist() == [1, 2, 3, 4]
    assert list((tmp_path / "summaries").iterdir())


def test_workers_of_a_dataset_do_not_disturb(tmp_path):
    class Forking(Memory):
        """Forks as a dataset with `python_multiprocessing` does, while the background is at work."""

        def write(self, record):
            super().write(record)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
                child = os.fork()
            if child == 0:
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

    monitor = TrainingMonitor(tmp_path / "run", writers=[Forking()])
    Loop(monitor, FakeStep()).train(vectors(*range(1, 21)))
    assert instrument.read(tmp_path / "run")["loss"].step.tolist() == [*range(1, 21)] and not monitor.errors


# Several ranks

def test_each_rank_has_its_own_numbers_and_rank_0_those_of_all(tmp_path, monkeypatch):
    class Parallel(FakeStep):
        schema = instrument.Schema([*FakeStep.schema, instrument.Metric("grad/norm", "1", "global", "identical")])

    monkeypatch.setattr(_compat, "job", lambda: "host 1234")
    outputs = [(0.0, np.array([step, 10.0 * step, 1.0], np.float32)) for step in (1, 2)]
    given = {rank: Memory() for rank in (0, 1)}
    loops = []
    for rank in (0, 1):
        monkeypatch.setattr(_compat, "rank_and_size", lambda rank=rank: (rank, 2))
        loops.append(Loop(TrainingMonitor(tmp_path / "run", writers=[given[rank]]), Parallel()))
    for loop in reversed(loops):  # while rank 0 holds the directory
        loop.train(outputs)
    run = instrument.read(tmp_path / "run")
    assert set(run) >= {"loss", "grad/norm", "step_time"} and set(run.ranks) == {1}
    assert "loss" in run.ranks[1] and "step_time" in run.ranks[1] and "grad/norm" not in run.ranks[1]
    assert given[0].steps == [1, 2] and given[1].steps == []
    assert not list((tmp_path / "run" / "rank_1").glob("events*"))


@pytest.mark.parametrize("scope", ["global", "local"])
@pytest.mark.parametrize("policy", ["log", "stop"])
def test_another_rank_leaves_to_rank_0_what_is_the_same_on_all(tmp_path, monkeypatch, scope, policy):
    """Also where an alarm looks at the record in the training thread."""
    class Parallel(FakeStep):
        schema = instrument.Schema([instrument.Metric("step", "step", "global", "identical"),
                                    instrument.Metric("loss", "loss", scope, "mean"),
                                    instrument.Metric("grad/norm_local", "1", "local", "rms")],
                                   ["histogram/weight/w", "histogram/activation/a"])

    monkeypatch.setattr(_compat, "job", lambda: "host 1234")
    outputs = [(0.0, np.concatenate([[step, 2.0, 1.0, 3.0], np.ones(2 * CARRIED)]).astype(np.float32)) for step in (1, 2)]
    loops = []
    for rank in (0, 1):
        monkeypatch.setattr(_compat, "rank_and_size", lambda rank=rank: (rank, 2))
        monitor = TrainingMonitor(tmp_path / "run", alarms=[NonFinite(policy=policy)], tokens_per_sample=1, batch_size=1)
        loops.append(Loop(monitor, Parallel()))
        monitor._find_step(loops[-1].params)
    # As when parts of the loss become known with the first call.
    Parallel.schema.replace([*Parallel.schema.metrics[:2], instrument.Metric("loss/part", "loss", scope, "mean"),
                             Parallel.schema.metrics[2]], Parallel.schema.histogram_names)
    for loop in reversed(loops):
        loop.train(outputs)
    own, run = instrument.read(tmp_path / "run").ranks[1], instrument.read(tmp_path / "run")
    assert {"loss", "perplexity", "grad/norm_local"} <= set(run) and len(run.histograms) == 2
    assert "step" not in own and "grad/norm_local" in own and "step_time" in own
    assert ("loss" in own) == ("loss/part" in own) == ("perplexity" in own) == (scope == "local")
    assert list(own.histograms) == ["histogram/activation/a"] * (scope == "local")
