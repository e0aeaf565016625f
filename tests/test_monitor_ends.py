"""TrainingMonitor when things end: signals while it writes, forked workers, warnings as errors, more calls after the end."""
import copy
import math
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import orjson
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.train.callback import RunContext

import instrument
from instrument import TrainingMonitor, runs
from instrument.alarms import Alarm, AlarmRaised, Finding, NonFinite
from instrument.samples import TextSampler
from networks import MLP
from test_monitor import Broken, FakeStep, Loop, Memory, vectors

ROOT = Path(__file__).parents[1]

# A child that has made 100 records, with a writer that takes 2 seconds for them.
BEGIN = f"""
import os, signal, sys, threading, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from instrument import TrainingMonitor
from instrument.writers import Writer
from test_monitor import Broken, FakeStep, Loop, vectors

class Slow(Writer):
    signals = ()  # seconds from the first record on

    def write(self, record):
        for after in self.signals:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGTERM)).start()
        self.signals = ()
        time.sleep(0.02)
        with open(sys.argv[1] + ".slow", "a") as file:
            file.write(str(record.step) + "\\n")

def train(steps, *writers, **options):
    monitor = TrainingMonitor(sys.argv[1], writers=writers, **options)
    Loop(monitor, FakeStep()).train(steps)

HUNDRED = vectors(*range(1, 101))
"""


def child(code, run, *options):
    return subprocess.run([sys.executable, *options, "-c", BEGIN + code, str(run)], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "GLOG_v": "3"})


def summary(run):
    return orjson.loads((run / "summary.json").read_bytes())


@pytest.mark.parametrize("when", [(0.3,), (0.3, 0.6), (0.3, 0.3, 0.9, 1.1)])
def test_signals_while_the_end_is_written_lose_nothing(tmp_path, when):
    run = tmp_path / "run"
    done = child(f"Slow.signals = {when}\ntrain(HUNDRED, Slow())\ntime.sleep(3)", run)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert instrument.read(run)["loss"].step.tolist() == list(range(1, 101))
    assert (tmp_path / "run.slow").read_text().split() == [str(step) for step in range(1, 101)]
    assert summary(run)["status"] == "finished" and summary(run)["records"] == 100  # it was only being written


def test_a_killed_process_has_written_though_another_writer_is_slow(tmp_path):
    done = child("TrainingMonitor.close = lambda self: None\ntrain(HUNDRED, Slow(), flush_seconds=0.1)\ntime.sleep(0.6)\n"
                 "os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "run")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert instrument.read(tmp_path / "run")["loss"].step.tolist() == list(range(1, 101))
    assert len((tmp_path / "run.slow").read_text().split()) < 60


def test_two_monitors_end_by_one_signal(tmp_path):
    done = child("""
from mindspore.train.callback import RunContext
monitors = [TrainingMonitor(sys.argv[1]), TrainingMonitor(sys.argv[1])]
params = {"train_network": FakeStep(), "cur_step_num": 0, "mode": "train"}
context = RunContext(params)
for training in range(2):
    params["cur_step_num"] = 0
    for monitor in monitors:
        monitor.on_train_begin(context)
    for step in range(1, 4):
        params.update(cur_step_num=step, net_outputs=vectors(step + 3 * training)[0])
        for monitor in monitors:
            monitor.on_train_step_end(context)
    if training == 0:
        for monitor in monitors:
            monitor.on_train_end(context)
os.kill(os.getpid(), signal.SIGTERM)
""", tmp_path / "run")
    assert done.returncode == -signal.SIGTERM, done.stderr
    for run in (tmp_path / "run", tmp_path / "run-2"):
        assert instrument.read(run)["loss"].step.tolist() == [1, 2, 3, 4, 5, 6]
        assert summary(run)["status"] == "terminated: SIGTERM"


def test_with_warnings_as_errors_training_goes_on_and_a_signal_ends_it(tmp_path):
    done = child("""
def steps():
    yield from vectors(1, 2)
    os.kill(os.getpid(), signal.SIGTERM)
    yield from vectors(3)
train(vectors(1, 2, 3), Broken())
print("trained", flush=True)
train(steps(), Broken())
""", tmp_path / "run", "-W", "error::UserWarning")
    assert done.returncode == -signal.SIGTERM and done.stdout.startswith("trained"), done.stderr
    assert done.stderr.count("UserWarning: Broken failed: OSError: disk full") == 2
    assert summary(tmp_path / "run")["status"] == "finished"
    assert summary(tmp_path / "run-2")["status"] == "terminated: SIGTERM"


def test_a_warning_that_is_an_error_is_printed(told):
    memory = Memory()
    Loop(TrainingMonitor(writers=[Broken(), memory]), FakeStep()).train(vectors(1, 2, 3))
    assert memory.steps == [1, 2, 3]
    assert len(told) == 1 and "Broken failed: OSError: disk full" in told[0]
    told.clear()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_worker_that_ends_leaves_the_run_alone(tmp_path):
    done = child("""
import warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of a fork in a process with threads
def steps():
    yield from vectors(1, 2)
    worker = os.fork()
    if worker == 0:
        sys.exit(0)
    assert os.waitpid(worker, 0)[1] == 0
    ready, tell = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.write(tell, b".")
        time.sleep(60)
    os.read(ready, 1)
    os.kill(worker, signal.SIGTERM)
    assert os.waitpid(worker, 0)[1] == signal.SIGTERM
    print(os.path.exists(sys.argv[1] + "/summary.json"))
    yield from vectors(3)
train(steps())
""", tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert summary(tmp_path / "run")["status"] == "finished" and summary(tmp_path / "run")["records"] == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_that_trains_says_once_that_it_records_nothing(tmp_path):
    done = child("""
monitor = TrainingMonitor(sys.argv[1])
worker = os.fork()
if worker == 0:
    Loop(monitor, FakeStep()).train(vectors(1, 2, 3))
    sys.exit(0)
assert os.waitpid(worker, 0)[1] == 0
Loop(monitor, FakeStep()).train(vectors(1, 2))
""", tmp_path / "run")
    assert done.returncode == 0 and done.stderr.count("this process records nothing") == 1, done.stderr
    assert instrument.read(tmp_path / "run")["loss"].step.tolist() == [1, 2]


def test_a_long_end_by_a_signal_is_cut_short(tmp_path):
    done = child("class Stuck(Slow):\n    def write(self, record):\n        super().write(record)\n        time.sleep(60)\n"
                 "Stuck.signals = (0.3,)\ntrain(HUNDRED, Stuck())", tmp_path / "run")
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert instrument.read(tmp_path / "run")["loss"].step.tolist() == list(range(1, 101))
    assert summary(tmp_path / "run")["given_up"] == ["Stuck"]


# After the end

def evaluate(monitor, network=None):
    loop = Loop(monitor, network or FakeStep())
    loop.params.update(mode="eval", metrics={"accuracy": 0.5})
    with monitor:
        monitor.on_eval_end(loop.context)


def test_an_evaluation_after_training_is_written_and_closed(tmp_path):
    held = []

    class Looking(Memory):
        def write(self, record):
            with pytest.raises(runs.RunInUse):
                runs.create(tmp_path / "run", resume=True)
            held.append(record.step)

    monitor = TrainingMonitor(tmp_path / "run", writers=[Looking()])
    Loop(monitor, FakeStep()).train(vectors(1, 2))
    evaluate(monitor)
    assert held == [1, 2, 2]
    assert instrument.read(tmp_path / "run")["val/accuracy"].step.tolist() == [2] and summary(tmp_path / "run")["records"] == 3
    with runs.create(tmp_path / "run", resume=True):
        with pytest.warns(UserWarning, match="TrainingMonitor failed: RunInUse"):
            evaluate(monitor)
    assert held == [1, 2, 2] and monitor.errors["TrainingMonitor"] == 1
    evaluate(monitor)  # the run is free again
    assert held == [1, 2, 2, 2] and not monitor.errors["Looking"]


def test_the_second_of_two_networks_loses_no_record():
    memory = Memory()
    monitor = TrainingMonitor(writers=[memory])
    Loop(monitor, FakeStep()).train(vectors(1))
    Loop(monitor, FakeStep()).train(vectors(1, 2))
    assert memory.steps == [1, 1, 2]


def test_the_end_of_an_alarm_costs_no_record_in_a_short_queue():
    memory = Memory()
    Loop(TrainingMonitor(writers=[memory], queue_size=1, when_full="wait"), FakeStep()).train(vectors(1, 2, 3))
    assert memory.steps == [1, 2, 3]


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_monitor_cannot_be_copied(copied):
    with pytest.raises(TypeError, match="a TrainingMonitor holds a thread and open files"):
        copied(TrainingMonitor(writers=[Memory()]))


# What keeps a place until it is queued

class Interrupted:
    """A vector whose copy, which waits for the device, is interrupted once."""

    ndim = 1

    def __init__(self, step, error):
        self.step, self.error = step, error

    def asnumpy(self):
        error, self.error = self.error, None
        if error is not None:
            raise error
        return np.array([self.step, 10.0 * self.step], np.float32)


def test_ctrl_c_while_the_device_is_waited_for_loses_no_step():
    memory = Memory()
    outputs = [*vectors(1, 2), (30.0, Interrupted(3, KeyboardInterrupt())), *vectors(4)]
    with pytest.raises(KeyboardInterrupt):
        Loop(TrainingMonitor(writers=[memory]), FakeStep()).train(outputs)
    assert memory.steps == [1, 2, 3, 4]


def test_a_signal_while_a_full_queue_is_waited_for_loses_no_step_and_ends_soon(tmp_path):
    done = child("""
class Stuck(Slow):
    def write(self, record):
        super().write(record)
        time.sleep(60)
Stuck.signals = (0.5,)
train(HUNDRED, Stuck(), when_full="wait", queue_size=5)
""", tmp_path / "run")
    assert done.returncode == -signal.SIGTERM, done.stderr
    steps = instrument.read(tmp_path / "run")["loss"].step.tolist()
    assert steps == list(range(1, len(steps) + 1)) and 6 <= len(steps) < 20
    assert summary(tmp_path / "run")["last_step"] == len(steps) == summary(tmp_path / "run")["records"]


def test_a_policy_that_raises_loses_no_step_that_was_made():
    memory = Memory()
    nan = (math.nan, np.array([2.0, math.nan], np.float32))
    with pytest.raises(AlarmRaised, match="NonFinite at step 2"):
        Loop(TrainingMonitor(writers=[memory], alarms=[NonFinite(policy="raise")]), FakeStep()).train(
            [*vectors(1), nan, *vectors(3, 4)])
    assert sorted({record.step for record in memory.records if record.values}) == [1, 2, 3]  # 3 had been made when 2 was read


def test_an_exception_leaves_the_last_call_too_whatever_every_says():
    def steps():
        yield from vectors(*range(1, 18))
        raise RuntimeError

    memory = Memory()
    monitor = TrainingMonitor(writers=[memory], every=10)
    with pytest.raises(RuntimeError):
        Loop(monitor, FakeStep()).train(steps())
    assert memory.steps == [10, 17]


def test_a_plain_cell_s_steps_are_numbered_on_after_a_call_that_failed():
    def steps():
        yield from [0.5] * 17
        raise RuntimeError

    memory = Memory()
    monitor = TrainingMonitor(writers=[memory], every=10, measure=False)
    network = nn.ReLU()
    with monitor:
        with pytest.raises(RuntimeError):
            Loop(monitor, network).train(steps())
        Loop(monitor, network).train([0.5] * 10)
    assert memory.steps == [10, 17, 27]


# What the summary says

def test_an_alarm_that_stops_nothing_is_not_said_to_have_stopped_training(tmp_path):
    def steps():
        yield from vectors(1)
        yield math.nan, np.array([2.0, math.nan], np.float32)
        raise RuntimeError("boom")

    stop = [NonFinite(policy="stop")]
    with pytest.raises(RuntimeError):
        Loop(TrainingMonitor(tmp_path / "run", alarms=stop), FakeStep()).train(steps())
    assert summary(tmp_path / "run")["status"] == "failed: RuntimeError: boom"
    Loop(TrainingMonitor(tmp_path / "last", alarms=stop), FakeStep()).train(
        [*vectors(1), (math.nan, np.array([2.0, math.nan], np.float32))])
    assert summary(tmp_path / "last")["status"] == "finished"


def test_a_program_that_outlives_the_signal_has_not_been_terminated(tmp_path):
    done = child("""
signal.signal(signal.SIGTERM, lambda number, frame: print("noted", flush=True))
def steps():
    yield from vectors(1, 2)
    os.kill(os.getpid(), signal.SIGTERM)
    yield from vectors(3)
train(steps())
""", tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, "noted\n"), done.stderr
    assert summary(tmp_path / "run")["status"] == "finished" and summary(tmp_path / "run")["records"] == 3


def test_an_alarm_in_an_evaluation_stops_training(tmp_path):
    class High(Alarm):
        needs = ("val/loss",)

        def check(self, record):
            return Finding("val/loss is high", "val/loss", 9.0) if record.values.get("val/loss", 0.0) > 1.0 else None

    monitor = TrainingMonitor(tmp_path / "run", alarms=[High(policy="stop")])
    loop = Loop(monitor, FakeStep())

    def steps():
        yield from vectors(1, 2)
        evaluation = RunContext({"mode": "eval", "eval_results": {"loss": 9.0}})
        monitor.on_eval_begin(evaluation)
        monitor.on_eval_end(evaluation)
        assert loop.context.get_stop_requested() and not evaluation.get_stop_requested()

    loop.train(steps())
    assert summary(tmp_path / "run")["status"].startswith("stopped: High at step 2")


# Steps, and what is said of them

def test_an_evaluation_is_recorded_at_the_step_at_which_it_was_made():
    class Counting(FakeStep):
        step_count = Tensor(12, ms.int32)

    memory = Memory()
    monitor = TrainingMonitor(writers=[memory], every=10)
    loop = Loop(monitor, Counting())

    def steps():
        yield from vectors(*range(1, 13))
        monitor.on_eval_end(RunContext({"mode": "eval", "eval_results": {"loss": 9.0}}))

    loop.train(steps())
    assert memory.steps == [10, 12, 12] and memory.column("val/loss") == [None, 9.0, None]


def test_an_evaluation_before_a_resumed_training_hides_nothing(tmp_path):
    Loop(TrainingMonitor(tmp_path / "run"), FakeStep()).train(vectors(1, 2, 3))
    monitor = TrainingMonitor(tmp_path / "run", resume=True)
    evaluate(monitor)
    Loop(monitor, FakeStep()).train(vectors(4, 5))
    run = instrument.read(tmp_path / "run")
    assert run["loss"].step.tolist() == [1, 2, 3, 4, 5] and run["val/accuracy"].step.tolist() == [3]


def test_what_was_made_again_but_not_recorded_does_not_stay(tmp_path):
    Loop(TrainingMonitor(tmp_path / "run"), FakeStep()).train(vectors(*range(1, 15)))
    step = FakeStep()
    step.step_count = Tensor(10, ms.int32)  # as the checkpoint has it
    Loop(TrainingMonitor(tmp_path / "run", resume=True, every=5), step).train(vectors(*range(11, 21)))
    assert instrument.read(tmp_path / "run")["loss"].step.tolist() == [*range(1, 11), 15, 20]


# What a step is said to have taken, and by which rate it was made

def test_the_time_of_a_text_sample_is_left_out_and_no_more(monkeypatch):
    class Clock:
        now = 100.0

    def generate(prompt):
        Clock.now += 50.0
        return prompt

    def steps():
        for output in vectors(1, 2, 3, 4):
            Clock.now += 4.0
            yield output

    monkeypatch.setattr("instrument.pace.time.perf_counter", lambda: Clock.now)
    memory = Memory()
    sampler = TextSampler(generate, [""], every=2)
    Loop(TrainingMonitor(writers=[memory], text_samples=sampler), FakeStep()).train(steps())
    assert [value for value in memory.column("step_time") if value is not None] == [4.0, 4.0, 4.0, 4.0]
    assert [value for value in memory.column("data_wait") if value is not None] == [4.0, 4.0, 4.0, 4.0]


def test_a_rate_that_another_callback_sets_belongs_to_the_next_step():
    class Settable(FakeStep):
        optimizer = nn.SGD(MLP().trainable_params(), 0.5)

    class Setting(Loop):
        def call(self, name):
            if name == "step_end":  # before the monitor's own hook
                Settable.optimizer.learning_rate.set_data(Tensor(0.5 / 2 ** self.params["cur_step_num"]))
            super().call(name)

    assert isinstance(Settable.optimizer.learning_rate, Parameter)
    memory = Memory()
    Setting(TrainingMonitor(writers=[memory]), Settable()).train(vectors(1, 2, 3))
    assert memory.column("learning_rate") == [0.5, 0.25, 0.125]
    Settable.optimizer.learning_rate.set_data(Tensor(0.5))
    memory = Memory()
    Setting(TrainingMonitor(writers=[memory], every=2), Settable()).train(vectors(1, 2, 3))
    assert memory.column("learning_rate") == [0.25, None]  # of the third step it was not asked in time


def test_a_rate_is_asked_for_anew_where_no_hook_comes_before_a_step():
    class Settable(FakeStep):
        optimizer = nn.SGD(MLP().trainable_params(), 0.5)

    class Short(Loop):
        def call(self, name):
            if name != "step_begin":
                super().call(name)

    def steps():
        for i, output in enumerate(vectors(1, 2, 3)):
            Settable.optimizer.learning_rate.set_data(Tensor(0.5 / 2 ** i))
            yield output

    memory = Memory()
    Short(TrainingMonitor(writers=[memory]), Settable()).train(steps())
    assert memory.column("learning_rate") == [0.5, 0.25, 0.125]


def test_the_last_record_s_time_is_that_of_its_step(monkeypatch):
    class Clock:
        now = 100.0

    def steps():
        for output in vectors(1, 2, 3):
            Clock.now += 4.0
            yield output
        Clock.now += 500.0  # something at the end of training

    monkeypatch.setattr("instrument.pace.time.perf_counter", lambda: Clock.now)
    memory = Memory()
    Loop(TrainingMonitor(writers=[memory], every=2), FakeStep()).train(steps())
    assert memory.column("step_time") == [4.0, 4.0]


@pytest.mark.parametrize("arguments, error, message", [
    ({"flush_seconds": None}, ValueError, "flush_seconds must be a positive number of seconds"),
    ({"writer_timeout": "30"}, ValueError, "writer_timeout must be a positive number of seconds"),
    ({"text_samples": [print]}, TypeError, "text_samples must be a TextSampler or a list of them")])
def test_arguments_that_would_do_harm_later_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        TrainingMonitor(writers=[Memory()], **arguments)
