"""CSV: one table with as many cells in each row as in the header, whatever appears later or ends a process."""
import csv
import math
import os

import pytest

from hostile import BEGUN, NAMES, counts
from instrument.record import Record
from instrument.writers import CsvWriter


def write(path, *records):
    with CsvWriter(path) as writer:
        for record in records:
            writer.write(record)


def table(path):
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert {len(row) for row in rows} == {len(rows[0])}
    return rows


def test_a_row_is_the_numbers_of_a_record(tmp_path):
    write(tmp_path, Record(10, 1735387200.12, {"loss": 2.3, "grad/norm": 1e-30}, {"h": counts()}, {"t": "x"}, (BEGUN,)))
    assert (tmp_path / "metrics.csv").read_text() == "step,time,loss,grad/norm\n10,1735387200.12,2.3,1e-30\n"


def test_what_is_not_finite_has_a_name_and_what_is_absent_is_empty(tmp_path):
    write(tmp_path, Record(1, 0.0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.0}), Record(2, 0.0, {"c": 1.0}))
    assert table(tmp_path / "metrics.csv")[1:] == [["1", "0.0", "nan", "inf", "-inf", "0.0"], ["2", "0.0", "", "", "1.0", ""]]


def test_numbers_come_back_as_they_were(tmp_path):
    values = [0.1, 1 / 3, 1e-310, 1e300, -0.0]
    write(tmp_path / "run.csv", *(Record(step, 1 / 3, {"loss": value}) for step, value in enumerate(values)))
    rows = table(tmp_path / "run.csv")[1:]
    assert [float(row[2]) for row in rows] == values and float(rows[0][1]) == 1 / 3


def test_a_metric_that_appears_later_is_a_new_last_column(tmp_path):
    write(tmp_path, Record(1, 0.0, {"loss": 1.0}), Record(2, 0.0, {"loss": 2.0}), Record(2, 0.0, {"val/loss": 3.0, "a": 4.0}),
          Record(3, 0.0, {"loss": 5.0}))
    assert table(tmp_path / "metrics.csv") == [
        ["step", "time", "loss", "val/loss", "a"], ["1", "0.0", "1.0", "", ""], ["2", "0.0", "2.0", "", ""],
        ["2", "0.0", "", "3.0", "4.0"], ["3", "0.0", "5.0", "", ""]]
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_names_survive_a_new_column_and_a_new_process(tmp_path):
    for step in (1, 2):
        write(tmp_path, Record(step, 0.0, dict.fromkeys(NAMES, 1.0)), Record(step, 0.0, {f"new {step}": 2.0}))
    rows = table(tmp_path / "metrics.csv")
    assert rows[0] == ["step", "time", *NAMES, "new 1", "new 2"] and len(rows) == 5
    assert rows[3] == ["2", "0.0", *["1.0"] * len(NAMES), "", ""]


def test_a_metric_may_be_called_step(tmp_path):
    for _ in range(2):
        write(tmp_path, Record(1, 0.0, {"step": 5.0, "time": 6.0}))
    assert table(tmp_path / "metrics.csv") == [["step", "time", "step", "time"], *[["1", "0.0", "5.0", "6.0"]] * 2]


def test_a_reader_sees_each_row_while_the_file_is_open(tmp_path):
    writer = CsvWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(Record(step, 0.0, {"loss": 1.0}))
        assert len(table(tmp_path / "metrics.csv")) == step + 1
    writer.close()


@pytest.mark.parametrize("torn", ["2", "2,0.0,1", "2,0.0,1.0", ","])
def test_a_torn_last_row_is_taken_out(tmp_path, torn):
    file = tmp_path / "metrics.csv"
    file.write_text(f"step,time,loss\n1,0.0,1.0\n{torn}")
    write(tmp_path, Record(2, 0.0, {"loss": 2.0}))
    assert file.read_text() == "step,time,loss\n1,0.0,1.0\n2,0.0,2.0\n"


def test_a_torn_row_longer_than_what_is_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("instrument.writers.csv._CHUNK", 8)
    file = tmp_path / "metrics.csv"
    file.write_text("step,time,loss\n1,0.0,1.0\n2,0.0000000000000000000000000000,1")
    write(tmp_path, Record(2, 0.0, {"loss": 2.0, "new": 3.0}))
    assert file.read_text() == "step,time,loss,new\n1,0.0,1.0,\n2,0.0,2.0,3.0\n"


def test_a_header_without_rows_and_an_empty_file_are_continued(tmp_path):
    for name, content in (("a.csv", "step,time,loss\n"), ("b.csv", "")):
        (tmp_path / name).write_text(content)
        write(tmp_path / name, Record(1, 0.0, {"loss": 1.0}))
        assert (tmp_path / name).read_text() == "step,time,loss\n1,0.0,1.0\n"


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "step,time", '"', "\n", "\xff\xfe"])
def test_another_file_is_refused_and_left_as_it_is(tmp_path, content):
    file = tmp_path / "metrics.csv"
    file.write_text(content)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="not written by a CsvWriter.*Give another path"):
        write(tmp_path, Record(1, 0.0, {"loss": 1.0}))
    assert file.read_bytes() == before


def test_a_killed_rewrite_is_forgotten(tmp_path):
    write(tmp_path, Record(1, 0.0, {"loss": 1.0}))
    (tmp_path / "metrics.csv.tmp").write_text("step,time,loss,val/l")
    write(tmp_path, Record(2, 0.0, {"val/loss": 2.0}))
    assert table(tmp_path / "metrics.csv") == [["step", "time", "loss", "val/loss"], ["1", "0.0", "1.0", ""],
                                               ["2", "0.0", "", "2.0"]]


def test_a_rewrite_that_fails_leaves_the_table_and_the_next_one_has_all(tmp_path, monkeypatch):
    writer = CsvWriter(tmp_path)
    writer.write(Record(1, 0.0, {"loss": 1.0}))
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            writer.write(Record(2, 0.0, {"val/loss": 2.0}))
    assert table(tmp_path / "metrics.csv") == [["step", "time", "loss"], ["1", "0.0", "1.0"]]
    assert os.listdir(tmp_path) == ["metrics.csv"]
    writer.write(Record(3, 0.0, {"val/loss": 3.0}))
    writer.close()
    assert table(tmp_path / "metrics.csv") == [["step", "time", "loss", "val/loss"], ["1", "0.0", "1.0", ""],
                                               ["3", "0.0", "", "3.0"]]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_raises_and_the_next_row_is_whole(tmp_path):
    writer = CsvWriter(tmp_path)
    writer.write(Record(1, 0.0, {"loss": 1.0}))
    held = writer._file
    writer._file = open("/dev/full", "ab")
    with pytest.raises(OSError, match="No space left"):
        writer.write(Record(2, 0.0, {"loss": 2.0}))
    held.close()
    writer.write(Record(3, 0.0, {"loss": 3.0}))
    writer.close()
    assert (tmp_path / "metrics.csv").read_text() == "step,time,loss\n1,0.0,1.0\n3,0.0,3.0\n"


def test_making_a_writer_makes_no_file_and_neither_does_a_record_without_numbers(tmp_path):
    write(tmp_path / "run", Record(1, 0.0, {}, {}, {"a": "text"}))
    assert not list(tmp_path.iterdir())
