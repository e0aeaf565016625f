"""What no writer may stumble over, one test for all of them: odd numbers and names, closing twice, going on after it."""
import io

import pytest
from rich.console import Console
from tensorboardX import SummaryWriter

from hostile import RECORDS
from instrument.record import Record, RunInfo
from instrument.writers import ConsoleWriter, CsvWriter, TensorBoardWriter, as_writer


def terminal():
    return Console(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False)


class Tracker:
    def __init__(self):
        self.logged = []

    def log(self, values, step=None):
        self.logged.append((step, values))


MAKE = {
    "csv": CsvWriter,
    "tensorboard": TensorBoardWriter,
    "log file": lambda path: ConsoleWriter(console=Console(file=io.StringIO())),
    "terminal": lambda path: ConsoleWriter(console=terminal()),
    "summary writer": lambda path: as_writer(SummaryWriter(str(path))),
    "tracker": lambda path: as_writer(Tracker()),
    "function": lambda path: as_writer(lambda record: None),
}


@pytest.fixture(params=MAKE)
def make(request, tmp_path):
    return lambda name="run": MAKE[request.param](tmp_path / name)


@pytest.mark.parametrize("kind", RECORDS)
def test_any_record_can_be_written_first_and_later(make, kind):
    writer = make()
    for _ in range(2):
        writer.write(RECORDS[kind])
    writer.flush()
    writer.close()


def test_all_records_one_after_the_other(make):
    writer = make()
    writer.start(RunInfo("run", None, {"hyper_parameters": {"lr": 0.1}}, total_steps=10))
    for record in RECORDS.values():
        writer.write(record)
    writer.close()


def test_closing_twice_and_writing_after_it(make):
    writer = make()
    writer.close()
    for step in (1, 2, 3):
        writer.start(RunInfo())
        writer.write(Record(step, 100.0 + step, {"loss": 1.0}))
        writer.flush()
        writer.close()
        writer.close()


def test_two_of_a_kind_in_one_process(make):
    first, second = make("first"), make("second")
    for step in (1, 2, 3):
        first.write(Record(step, 100.0 + step, {"loss": 1.0}))
        second.write(Record(step, 100.0 + step, {"loss": 2.0}))
    first.close()
    second.write(Record(4, 104.0, {"loss": 2.0}))
    second.close()
