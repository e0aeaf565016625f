"""Background: order, a full queue, writers that raise or hang, and the end."""
import os
import sys
import threading
import time

import pytest

from instrument.background import Background, Kept
from instrument.record import Incident, Record, RunInfo
from instrument.writers import Writer


class Memory(Writer):
    """Keeps what it is told."""

    def __init__(self):
        self.told, self.flushed, self.closed = [], 0, 0

    def start(self, run):
        self.told.append(run.name)

    def write(self, record):
        self.told.append(record.step)

    def flush(self):
        self.flushed += 1

    def close(self):
        self.closed += 1


class Held(Memory):
    """Waits in `write` until it is let go."""

    def __init__(self):
        super().__init__()
        self.go, self.inside = threading.Event(), threading.Event()

    def write(self, record):
        self.inside.set()
        self.go.wait(20)
        super().write(record)


class Failing(Memory):
    def write(self, record):
        raise OSError("disk full")


def records(item):
    return [Record(item, 0.0, {"loss": 1.0})]


def make(*writers, prepare=records, **options):
    return Background(writers, prepare, **{"flush_seconds": 100.0, **options})


def test_items_reach_each_writer_in_order():
    first, second = Memory(), Memory()
    background = make(first, second)
    background.start(RunInfo("run"))
    for step in range(1000):
        background.put(step)
    background.close()
    assert first.told == second.told == ["run", *range(1000)]
    assert first.closed == 1 and background.written == 1000 and not background.errors


def test_put_does_not_wait_for_a_slow_writer():
    writer = Held()
    background = make(writer)
    started = time.perf_counter()
    for step in range(100):
        background.put(step)
    assert time.perf_counter() - started < 0.5 and writer.told == []
    writer.go.set()
    background.close()
    assert writer.told == [*range(100)]


def test_a_full_queue_drops_the_oldest_and_says_so_once():
    writer = Held()
    background = make(writer, capacity=3)
    background.put(0)
    assert writer.inside.wait(5)
    for step in range(1, 8):
        background.put(step)
    writer.go.set()
    background.close()
    assert writer.told == [0, 5, 6, 7] and background.dropped == 4
    assert [report for report in background.reports() if "oldest of 3" in report] and not list(background.reports())


def test_a_full_queue_can_wait():
    writer = Held()
    background = make(writer, capacity=2, when_full="wait")
    background.put(0)
    assert writer.inside.wait(5)
    putting = threading.Thread(target=lambda: [background.put(step) for step in range(1, 8)])
    putting.start()
    putting.join(0.2)
    assert putting.is_alive()  # two wait, and no more have a place
    writer.go.set()
    putting.join(5)
    background.close()
    assert writer.told == [*range(8)] and background.dropped == 0


def test_a_writer_that_raises_is_reported_once_and_the_others_go_on():
    failing, memory = Failing(), Memory()
    background = make(failing, memory)
    for step in range(5):
        background.put(step)
    background.close()
    assert memory.told == [*range(5)] and failing.closed == 1
    assert background.errors == {"Failing": 5}
    reports = list(background.reports())
    assert len(reports) == 1 and "Failing failed: OSError: disk full. Training goes on" in reports[0]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
def test_nothing_that_a_writer_raises_ends_the_thread(error):
    class Exiting(Memory):
        def write(self, record):
            raise error

    memory = Memory()
    background = make(Exiting(), memory)
    for step in range(3):
        background.put(step)
    background.close()
    assert memory.told == [0, 1, 2] and background.errors["Exiting"] == 3


def test_an_item_that_cannot_be_prepared_is_left_out():
    def prepare(item):
        if item == 1:
            raise ValueError("no")
        return records(item)

    memory = Memory()
    background = make(memory, prepare=prepare)
    for step in range(3):
        background.put(step)
    background.close()
    assert memory.told == [0, 2] and background.errors == {"TrainingMonitor": 1}


def test_a_writer_that_hangs_is_given_up_and_the_others_get_everything():
    before, hung, after = Memory(), Held(), Memory()
    background = make(before, hung, after, timeout=0.2)
    for step in range(10):
        background.put(step)
    started = time.perf_counter()
    background.close()
    assert time.perf_counter() - started < 5
    assert before.told == after.told == [*range(10)]
    assert before.closed == after.closed == 1
    assert background.given_up == ["Held"] and hung.closed == 0
    assert any("Held has not returned for 0.2 seconds" in report for report in background.reports())
    hung.go.set()  # whatever it does now changes nothing
    background.put(10)
    background.close()
    assert after.told[-1] == 10 and hung.told in ([], [0])


def test_a_writer_that_hangs_lets_a_waiting_put_go_on():
    hung, memory = Held(), Memory()
    background = make(hung, memory, timeout=0.2, capacity=1, when_full="wait")
    for step in range(5):
        background.put(step)
    background.close()
    assert memory.told == [*range(5)]
    hung.go.set()


def test_a_writer_that_hangs_at_the_end_is_given_up():
    class Stuck(Memory):
        def close(self):
            time.sleep(20)

    memory = Memory()
    background = make(Stuck(), memory, timeout=0.2)
    background.put(1)
    started = time.perf_counter()
    background.close()
    assert time.perf_counter() - started < 5 and memory.closed == 1 and background.given_up == ["Stuck"]


def test_what_there_is_no_time_for_at_the_end_is_counted():
    writer = Held()
    background = make(writer)
    for step in range(5):
        background.put(step)
    threading.Timer(0.3, writer.go.set).start()
    background.close(timeout=0.1)
    assert background.dropped == 4 and writer.told == [0]
    assert any("4 records were left out" in report for report in background.reports())


def test_a_slow_writer_delays_the_others_by_no_more_than_one_call():
    class Slow(Memory):
        def write(self, record):
            time.sleep(0.05)
            super().write(record)

    slow, memory = Slow(), Memory()
    background = make(slow, memory)
    for step in range(40):
        background.put(step)
    end = time.monotonic() + 1.0
    while len(memory.told) < 40 and time.monotonic() < end:
        time.sleep(0.01)
    assert memory.told == [*range(40)] and len(slow.told) < 20
    background.close()
    assert slow.told == [*range(40)]


def test_only_the_writer_that_is_too_slow_at_the_end_misses_records():
    slow, memory = Held(), Memory()
    background = make(slow, memory)
    background.put(0)
    assert slow.inside.wait(5)
    for step in range(1, 5):
        background.put(step)
    threading.Timer(0.4, slow.go.set).start()
    background.close(timeout=0.1)
    assert memory.told == [*range(5)] and slow.told == [0] and slow.closed == memory.closed == 1
    assert background.dropped == 4 and background.given_up == []
    background.put(5)  # the next run begins anew
    background.close()
    assert slow.told == [0, 5] and memory.told == [*range(6)]


def test_only_the_writer_that_does_not_keep_up_misses_records():
    class Slow(Memory):
        def write(self, record):
            time.sleep(0.02)
            super().write(record)

    slow, memory = Slow(), Memory()
    background = make(slow, memory, capacity=10)
    for step in range(60):
        background.put(step)
        while len(background._items) > 5:  # else all writers would miss some
            time.sleep(0.001)
    background.close()
    assert memory.told == [*range(60)] and slow.told[-10:] == [*range(50, 60)]
    assert background.dropped == 60 - len(slow.told) > 0
    assert any("Slow does not keep up: the oldest of 10" in report for report in background.reports())


def test_writers_that_keep_up_miss_nothing_however_quickly_items_come():
    first, second = Memory(), Memory()
    background = make(first, second, capacity=10)
    for step in range(3000):
        background.put(step)
        while len(background._items) > 5:
            time.sleep(0)
    background.close()
    assert first.told == second.told == [*range(3000)] and background.dropped == 0


def test_what_must_be_kept_is_never_left_out():
    incident = Incident("NonFinite", "begin", 2, 2, 1, "the loss is NaN")
    writer = Held()
    background = make(writer, capacity=1, prepare=lambda item: [item] if isinstance(item, Record) else records(item))
    background.put(0)
    assert writer.inside.wait(5)
    background.put(1)
    background.put(Record(2, 0.0, {}, alarms=(incident,)))
    background.put(Kept())
    background._prepare = lambda item: [] if isinstance(item, Kept) else [item] if isinstance(item, Record) else records(item)
    writer.go.set()
    background.close()
    assert writer.told == [0, 1, 2] and background.dropped == 0


def test_writers_are_flushed_from_time_to_time_and_when_asked():
    memory = Memory()
    background = make(memory, flush_seconds=0.05)
    for flushed in range(1, 4):
        background.put(flushed)
        end = time.monotonic() + 5
        while memory.flushed < flushed and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        assert memory.flushed == flushed  # and not again while there is nothing new
    background.close()
    second = Memory()
    background = make(second)
    background.put(1)
    assert background.flush(5.0) and second.told == [1] and second.flushed == 1
    background.close()


def test_what_is_put_after_the_end_begins_anew():
    memory = Memory()
    background = make(memory)
    threads = set(threading.enumerate())  # one that another test has hung may still be there
    for step in range(3):
        background.put(step)
        background.close()
    assert memory.told == [0, 1, 2] and memory.closed == 3
    assert set(threading.enumerate()) <= threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 warns of a fork in a process with threads")
def test_a_forked_worker_writes_nothing_and_ends():
    memory = Memory()
    background = make(memory)
    background.put(1)
    child = os.fork()
    if child == 0:
        background.put(2)
        background.close()
        os._exit(len(memory.told) > 1)
    assert os.waitpid(child, 0)[1] == 0
    background.put(3)
    background.close()
    assert memory.told == [1, 3]


def test_many_threads_may_put():
    memory = Memory()
    background = make(memory)
    threads = [threading.Thread(target=lambda: [background.put(i) for i in range(200)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    background.close()
    assert sorted(memory.told) == sorted([*range(200)] * 8)
