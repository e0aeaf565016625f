"""`as_writer`: what is taken for what, what each kind gets, and what is refused."""
import functools
import logging
import math
import sys
import types

import pytest
from tensorboardX import SummaryWriter
from tensorboardX.proto.summary_pb2 import Summary

from hostile import BEGUN, counts, events_of
from instrument.record import Record, RunInfo
from instrument.writers import JsonlWriter, Writer, as_writer

RECORD = Record(3, 100.0, {"loss": 1.5, "a b/ü": math.inf}, {"histogram/weight/a": counts(octave_0=3), "none": counts()},
                {"sample/0": "text"}, (BEGUN,))


class Calls:
    """Keeps what its methods were called with."""

    def __init__(self):
        self.calls = []

    def kept(self, *arguments):
        self.calls.append(arguments)


def test_a_writer_stays_what_it_is(tmp_path):
    writer = JsonlWriter(tmp_path)
    assert as_writer(writer) is writer


# Objects with write(record)

class Whole(Calls):
    every_rank = True

    def start(self, run):
        self.kept("start", run.name)

    def write(self, record):
        self.kept("write", record)

    def flush(self):
        self.kept("flush")

    def close(self):
        self.kept("close")


def test_what_writes_gets_the_record_and_the_run():
    taken = Whole()
    writer = as_writer(taken)
    assert isinstance(writer, Writer) and writer.every_rank is True and writer.name == "Whole"
    writer.start(RunInfo("exp1"))
    writer.write(RECORD)
    assert taken.calls == [("start", "exp1"), ("write", RECORD)]


def test_closing_is_passed_on_once_after_the_last_record():
    taken = Whole()
    writer = as_writer(taken)
    writer.flush()
    writer.close()
    assert taken.calls == []  # nothing was written
    for _ in range(2):
        writer.write(RECORD)
        writer.flush()
        writer.close()
        writer.close()
    assert [name for name, *_ in taken.calls] == ["write", "flush", "flush", "close"] * 2


def test_nothing_else_is_needed_than_write():
    class Bare:
        def write(self, record):
            self.step = record.step

    bare = Bare()
    with as_writer(bare) as writer:
        writer.start(RunInfo())
        writer.write(RECORD)
        writer.flush()
    assert bare.step == 3 and writer.every_rank is False


# Objects with add_scalar

class Scalars(Calls):
    def add_scalar(self, tag, value, step):
        self.kept(tag, value, step)


def test_what_adds_scalars_gets_each_number_and_nothing_more():
    taken = Scalars()
    as_writer(taken).write(RECORD)
    assert taken.calls == [("loss", 1.5, 3), ("a b/ü", math.inf, 3)]


def test_tensorboardx_gets_histograms_texts_and_alarms_too(tmp_path):
    with as_writer(SummaryWriter(str(tmp_path))) as writer:
        assert writer.name == "SummaryWriter"
        writer.write(Record(3, 100.0, {"loss": 1.5}, RECORD.histograms, RECORD.texts, RECORD.alarms))
    values: dict[str, list[tuple[int, Summary.Value]]] = {}
    for event in events_of(tmp_path):
        for value in event.summary.value:
            values.setdefault(value.tag, []).append((event.step, value))
    assert [(step, value.simple_value) for step, value in values["loss"]] == [(3, 1.5)]
    (step, value), = values["histogram/weight/a"]
    assert step == 3 and list(value.histo.bucket) == [3] and "none" not in values
    for tag, text in (("sample/0", b"text"), ("alarms/NonFinite", str(BEGUN).encode())):
        (step, value), = values[f"{tag}/text_summary"]
        assert (step, value.tensor.string_val[0]) == (3, text)


# Objects with log

def test_what_logs_gets_all_numbers_with_the_step():
    class Run(Calls):
        def log(self, data, step=None, commit=None):
            self.kept(data, step)

        def finish(self):
            self.kept("finish")

    run = Run()
    with as_writer(run) as writer:
        writer.write(RECORD)
        writer.write(Record(4, 100.0, {}))
    # Two calls of Model.train may write into one run, so it is not finished.
    assert run.calls == [({"loss": 1.5, "a b/ü": math.inf}, 3)]


def test_without_a_step_argument_it_is_one_of_the_numbers():
    class Table(Calls):
        def log(self, row):
            self.kept(row)

    table = Table()
    as_writer(table).write(RECORD)
    assert table.calls == [({"step": 3, "loss": 1.5, "a b/ü": math.inf},)]


def test_log_metrics_comes_before_log():
    class Logger(Calls):
        def log(self, text):
            raise AssertionError

        def log_metrics(self, metrics, step):
            self.kept(metrics, step)

    logger = Logger()
    as_writer(logger).write(RECORD)
    assert logger.calls == [(RECORD.values, 3)]


def test_a_module_with_log_is_such_an_object():
    module, calls = types.ModuleType("tracker"), []
    module.log = lambda data, step=None: calls.append((data, step))
    writer = as_writer(module)
    writer.write(RECORD)
    assert writer.name == "tracker" and calls == [(RECORD.values, 3)]


# Functions

def test_a_function_gets_the_record():
    records = []

    def collect(record):
        records.append(record)

    class Collector:
        def __call__(self, record):
            records.append(record)

    for function, name in ((collect, "collect"), (records.append, "append"), (Collector(), "Collector"),
                           (functools.partial(collect), "partial"), (lambda record: records.append(record), "<lambda>")):
        with as_writer(function) as writer:
            writer.write(RECORD)
        assert records.pop() is RECORD and not records and writer.name == name


def test_an_error_of_it_is_raised():
    with pytest.raises(ZeroDivisionError):
        as_writer(lambda record: 1 / 0).write(RECORD)


# What is refused

@pytest.mark.parametrize("thing", [None, 1, "runs/first", {}, object(), logging.getLogger(), lambda: None,
                                   lambda record, step: None])
def test_what_takes_no_numbers_is_refused_with_what_would_be_taken(thing):
    with pytest.raises(TypeError, match=r"must be a Writer, an object with write\(record\).*is none of these"):
        as_writer(thing)


@pytest.mark.parametrize("thing", [JsonlWriter, SummaryWriter, dict])
def test_a_class_is_refused_and_an_instance_asked_for(thing):
    with pytest.raises(TypeError, match=f"{thing.__name__} is a class. Make an instance of it"):
        as_writer(thing)


def test_a_file_is_refused(tmp_path):
    with open(tmp_path / "log.txt", "w") as file:
        for each in (file, sys.__stderr__):
            with pytest.raises(TypeError, match="is a file, which takes text. Use JsonlWriter or CsvWriter"):
                as_writer(each)
