"""Pace: step time, data wait and throughput, from a clock made by hand."""
import pytest

from instrument.pace import Epochs, Pace


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr("instrument.pace.time.perf_counter", lambda: Clock.now)
    return Clock


def run(pace, clock, call, wait, compute):
    """One call of the step."""
    clock.now += wait
    pace.step_begins()
    clock.now += compute
    mark = pace.mark(call)
    pace.step_ended()
    return mark


def test_step_time_wait_and_throughput_are_means_over_the_calls(clock):
    pace = Pace(batch_size=8, tokens_per_sample=100)
    pace.forget()
    pace.begin(0)
    run(pace, clock, 1, 1.0, 2.0)
    mark = run(pace, clock, 2, 3.0, 4.0)
    assert pace.take(mark) == {"step_time": 5.0, "data_wait": 2.0, "data_wait_fraction": 0.4,
                               "samples_per_second": 1.6, "tokens_per_second": 160.0}
    mark = run(pace, clock, 3, 0.0, 4.0)
    assert pace.take(mark) == {"step_time": 4.0, "data_wait": 0.0, "data_wait_fraction": 0.0,
                               "samples_per_second": 2.0, "tokens_per_second": 200.0}


def test_what_is_no_training_is_left_out(clock):
    pace = Pace()
    pace.begin(0)
    pace.take(run(pace, clock, 1, 0.0, 2.0))
    clock.now += 1000.0  # evaluation
    pace.begin(1)
    assert pace.take(run(pace, clock, 2, 0.5, 2.0)) == {"step_time": 2.5, "data_wait": 0.5, "data_wait_fraction": 0.2}


def test_a_mark_taken_later_tells_of_its_own_call(clock):
    pace = Pace()
    pace.begin(0)
    first = run(pace, clock, 1, 0.0, 2.0)
    second = run(pace, clock, 2, 0.0, 6.0)
    assert pace.take(first)["step_time"] == 2.0 and pace.take(second)["step_time"] == 6.0


def test_without_the_hook_before_a_step_the_wait_is_not_known(clock):
    pace = Pace()
    pace.begin(0)
    clock.now += 4.0
    assert pace.take(pace.mark(2)) == {"step_time": 2.0}


def test_another_call_of_train_starts_anew(clock):
    pace = Pace()
    pace.begin(0)
    pace.take(run(pace, clock, 7, 0.0, 2.0))
    clock.now += 50.0
    pace.forget()
    clock.now += 50.0
    pace.begin(0)
    assert pace.take(run(pace, clock, 1, 1.0, 3.0)) == {"step_time": 4.0, "data_wait": 1.0, "data_wait_fraction": 0.25}


def test_a_clock_that_stands_still_gives_nothing(clock):
    pace = Pace(batch_size=1)
    pace.begin(0)
    assert pace.take(run(pace, clock, 1, 0.0, 0.0)) == {}


@pytest.mark.parametrize("calls, expected", [
    ([[(1, 1), (2, 1), (3, 2), (4, 2)]], [0.5, 1.0, 1.5, 2.0]),
    ([[(2, 1), (4, 2)]], [1.0, 2.0]),  # a data sink: one hook an epoch
    ([[(1, 1), (2, 1)], [(1, 1), (2, 1)]], [0.5, 1.0, 1.5, 2.0]),  # Model.train once more
    ([[(1, 1), (2, 1)], [(4, 2)]], [0.5, 1.0, 3.0]),  # the first epoch without a record
    ([[(1, 1), (2, 1)], [(1, 2), (2, 2)]], [0.5, 1.0, 1.5, 2.0]),  # and with initial_epoch=1
    ([[(1, 4), (2, 4)]], [3.5, 4.0]),  # another process with initial_epoch=3
    ([[(1, None), (3, None)]], [0.5, 1.5]),  # a loop that counts no epochs
])
@pytest.mark.parametrize("by_hand", [0, 3])  # calls of the step before there was a run
def test_epochs_go_on(calls, expected, by_hand):
    epochs, found, made = Epochs(), [], by_hand
    for training in calls:
        epochs.begin(0, made, resumed=False)
        first = training[0][1]
        epochs.epoch_begins({"batch_num": 2, "cur_epoch_num": 1 if first == 2 and training[0][0] > 2 else first})
        found += [epochs.at(call, {"batch_num": 2, "cur_epoch_num": number})["epoch"] for call, number in training]
        made += training[-1][0]
    assert found == expected


def test_epochs_of_a_resumed_run_and_of_loops_that_tell_nothing():
    epochs = Epochs()
    epochs.begin(0, 6, resumed=True)
    assert epochs.at(1, {"batch_num": 4, "cur_epoch_num": 1}) == {"epoch": 1.75}
    for params in ({}, {"batch_num": -1}, {"batch_num": None}, {"batch_num": 0, "cur_epoch_num": 1}):
        assert epochs.at(1, params) == {}


def test_an_evaluation_is_neither_training_nor_waiting(clock):
    pace = Pace()
    pace.begin(0)
    run(pace, clock, 1, wait=1.0, compute=2.0)
    clock.now += 0.5
    pace.evaluation_begins()
    clock.now += 60.0
    pace.evaluation_ends()
    pace.evaluation_ends()
    pace.take(run(pace, clock, 2, wait=1.0, compute=2.0))
    clock.now += 0.5
    pace.evaluation_begins()
    clock.now += 60.0
    pace.evaluation_ends()
    values = pace.take(run(pace, clock, 3, wait=1.0, compute=2.0))
    assert values == {"step_time": 3.5, "data_wait": 1.5, "data_wait_fraction": 1.5 / 3.5}


def test_an_evaluation_inside_of_an_evaluation_counts_once(clock):
    pace = Pace()
    pace.begin(0)
    pace.take(run(pace, clock, 1, wait=1.0, compute=2.0))
    pace.evaluation_begins()
    clock.now += 20.0
    pace.evaluation_begins()
    clock.now += 20.0
    pace.evaluation_ends()
    clock.now += 20.0
    pace.evaluation_ends()
    assert pace.take(run(pace, clock, 2, wait=1.0, compute=2.0))["step_time"] == 3.0
    pace.evaluation_begins()  # and fails, before another call of Model.train
    pace.forget()
    pace.begin(0)
    run(pace, clock, 1, wait=1.0, compute=2.0)
    pace.evaluation_begins()
    clock.now += 60.0
    pace.evaluation_ends()
    assert pace.take(run(pace, clock, 2, wait=1.0, compute=2.0))["step_time"] == 3.0


def test_a_step_that_fails_is_not_waited_for(clock):
    pace = Pace()
    pace.begin(0)
    pace.take(run(pace, clock, 1, wait=1.0, compute=2.0))
    clock.now += 1.0
    pace.step_begins()
    clock.now += 8.0  # it raises, and the loop goes on with the next batch
    values = pace.take(run(pace, clock, 2, wait=0.5, compute=2.0))
    assert values == {"step_time": 11.5, "data_wait": 1.0, "data_wait_fraction": 1.0 / 11.5}
