"""JSON Lines: what is in the files of a run, and what survives a killed process, a full disk and a fork."""
import math
import os

import numpy as np
import orjson
import pytest

from instrument import lines
from instrument.bins import BINS
from instrument.record import Incident, Record, RunInfo
from instrument.writers import JsonlWriter


def write(writer, *records):
    with writer:
        for record in records:
            writer.write(record)


def lines_of(run, name="metrics-00000.jsonl"):
    return (run / name).read_bytes().splitlines(keepends=True)


def documents(run, name="metrics-00000.jsonl"):
    return [orjson.loads(line) for line in lines_of(run, name)]


def names_in(run):
    return sorted(path.name for path in run.iterdir())


# Lines

def test_a_line_is_the_record(tmp_path):
    write(JsonlWriter(tmp_path), Record(10, 1735387200.12, {"loss": 2.3, "grad/norm": 0.8}))
    assert lines_of(tmp_path) == [b'{"step":10,"time":1735387200.12,"loss":2.3,"grad/norm":0.8}\n']


def test_a_reader_sees_each_line_while_the_file_is_open(tmp_path):
    writer = JsonlWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(Record(step, 0.0, {"loss": 1.0}))
        assert len(lines_of(tmp_path)) == step
    writer.close()


def test_what_is_not_finite_is_null_and_named(tmp_path):
    values = {"loss": math.nan, "grad/norm": math.inf, "weight/norm": 1.0, "activation/mean/a": -math.inf}
    write(JsonlWriter(tmp_path), Record(1, 0.0, values))
    assert documents(tmp_path) == [{
        "step": 1, "time": 0.0, "loss": None, "grad/norm": None, "weight/norm": 1.0, "activation/mean/a": None,
        "nonfinite": {"loss": "nan", "grad/norm": "inf", "activation/mean/a": "-inf"}}]


def test_nan_in_every_field_of_a_record_is_written(tmp_path):
    incident = Incident("NonFinite", "begin", 1, 1, 1, "nan", metric="loss", value=math.nan)
    write(JsonlWriter(tmp_path), Record(1, math.nan, {"loss": math.nan}, {}, {"nan": "nan"}, (incident,)))
    assert documents(tmp_path) == [{"step": 1, "time": None, "loss": None, "nonfinite": {"loss": "nan"}}]
    alarm, = documents(tmp_path, "alarms.jsonl")
    assert alarm["value"] is None and alarm["nonfinite"] == {"value": "nan"}


@pytest.mark.parametrize("name", ["a/b/c", "with spaces ", "größe/名前/🙂", 'quo"te', "back\\slash", "", "line\nbreak",
                                  ":null", "nul\0", "a:[b", "a:{"])
def test_a_name_is_what_it_was(tmp_path, name):
    write(JsonlWriter(tmp_path), Record(1, 0.0, {name: 2.5, "loss": 1.0}))
    assert documents(tmp_path) == [{"step": 1, "time": 0.0, name: 2.5, "loss": 1.0}]


def test_a_metric_with_a_name_of_the_line_itself_replaces_nothing(tmp_path):
    write(JsonlWriter(tmp_path), Record(1, 9.0, {"time": 2.5, "step": math.inf, "loss": 1.0}))
    assert documents(tmp_path) == [{"step": 1, "time": 9.0, "loss": 1.0, "reserved": {"time": 2.5, "step": None},
                                    "nonfinite": {"step": "inf"}}]


@pytest.mark.parametrize("value, number", [
    (np.float32(0.1), float(np.float32(0.1))), (np.float64(0.1), 0.1), (np.int64(3), 3.0), (np.float16(0.5), 0.5),
    (np.array(2.5), 2.5), (np.array([2.5]), 2.5), (True, True), (7, 7), (2**70, 2.0**70)])
def test_a_number_of_any_type_is_a_number(tmp_path, value, number):
    with np.errstate(all="raise"):
        write(JsonlWriter(tmp_path), Record(np.int64(1), 0.0, {"a": value, "loss": 1.0}))
    assert documents(tmp_path) == [{"step": 1, "time": 0.0, "a": number, "loss": 1.0}]


@pytest.mark.parametrize("value", [None, "1.0", [1.0], {}, {"a": 1}, (1, 2), np.ones(2), 10**400, object(), b"1"])
def test_what_is_no_number_is_named_and_takes_no_other_with_it(tmp_path, value):
    writer = JsonlWriter(tmp_path)
    with pytest.raises(TypeError, match=r"at step 3 these are none, and were left out: 'a'\. Give float"):
        writer.write(Record(3, 0.0, {"a": value, "loss": 1.0}, {}, {"said": "yes"}))
    assert documents(tmp_path) == [{"step": 3, "time": 0.0, "loss": 1.0}]
    assert documents(tmp_path, "samples.jsonl")[0]["text"] == "yes"


def test_bytes_that_are_no_unicode_are_written_out(tmp_path):
    incident = Incident("Mine", "begin", 1, 1, 1, "a\udcff")
    write(JsonlWriter(tmp_path), Record(1, 0.0, {"a\udcff": 1.0, "loss": 2.0}, {"h\udcff": np.ones(BINS, int)},
                                        {"t\udcff": "b\udcff"}, (incident,)))
    assert documents(tmp_path) == [{"step": 1, "time": 0.0, "a\\udcff": 1.0, "loss": 2.0}]
    assert documents(tmp_path, "samples.jsonl") == [{"step": 1, "time": 0.0, "name": "t\\udcff", "text": "b\\udcff"}]
    assert documents(tmp_path, "alarms.jsonl")[0]["message"] == "a\\udcff"
    assert list(documents(tmp_path, "histograms-00000.jsonl")[0]["histograms"]) == ["h\\udcff"]


def test_each_kind_has_its_file_and_a_record_without_values_no_line(tmp_path):
    counts = np.zeros(BINS, np.int64)
    counts[[60, 64]] = 2**53 + 1, 7
    begins = Incident("LossSpike", "begin", 5, 5, 1, "the loss is high", metric="loss", value=9.5, where="head")
    ends = Incident("LossSpike", "end", 5, 7, 3, "the loss is high", metric="loss")
    write(JsonlWriter(tmp_path), Record(7, 2.5, {}, {"histogram/a": counts, "none": np.zeros(BINS, np.int64)},
                                        {"a": "x\ny", "b": ""}, (begins, ends)))
    assert names_in(tmp_path) == ["alarms.jsonl", "histograms-00000.jsonl", "samples.jsonl"]
    assert documents(tmp_path, "histograms-00000.jsonl") == [{"step": 7, "time": 2.5, "histograms": {
        "histogram/a": {"low": 60, "counts": [2**53 + 1, 0, 0, 0, 7]}, "none": {"low": 0, "counts": []}}}]
    assert documents(tmp_path, "samples.jsonl") == [
        {"step": 7, "time": 2.5, "name": "a", "text": "x\ny"}, {"step": 7, "time": 2.5, "name": "b", "text": ""}]
    assert documents(tmp_path, "alarms.jsonl") == [
        {"step": 7, "time": 2.5, "alarm": "LossSpike", "state": "begin", "first_step": 5, "last_step": 5, "steps": 1,
         "message": "the loss is high", "metric": "loss", "value": 9.5, "where": "head"},
        {"step": 7, "time": 2.5, "alarm": "LossSpike", "state": "end", "first_step": 5, "last_step": 7, "steps": 3,
         "message": "the loss is high", "metric": "loss", "value": None, "where": ""}]


def test_counts_that_are_none_leave_the_other_files_alone(tmp_path):
    writer = JsonlWriter(tmp_path)
    with pytest.raises(ValueError):
        writer.write(Record(1, 0.0, {"loss": 1.0}, {"h": ["many"]}, {"a": "b"}))
    assert names_in(tmp_path) == ["metrics-00000.jsonl", "samples.jsonl"]


def test_every_rank_has_its_own_numbers():
    assert JsonlWriter.every_rank


# Rotation

def records(*steps):
    return [Record(step, 0.0, {"loss": 1.0}) for step in steps]


def test_files_follow_each_other_and_the_oldest_go(tmp_path):
    size = len(b'{"step":1,"time":0.0,"loss":1.0}\n')
    write(JsonlWriter(tmp_path, rotate_bytes=2 * size, keep_last=2), *records(*range(1, 8)))
    assert names_in(tmp_path) == ["metrics-00002.jsonl", "metrics-00003.jsonl"]
    assert [len(lines_of(tmp_path, name)) for name in names_in(tmp_path)] == [2, 1]


def test_a_line_larger_than_a_file_may_be_is_a_file(tmp_path):
    write(JsonlWriter(tmp_path, rotate_bytes=10), *records(1, 2, 3))
    assert [len(lines_of(tmp_path, name)) for name in names_in(tmp_path)] == [1, 1, 1]


def test_a_later_process_goes_on_in_the_newest_file(tmp_path):
    for step in (1, 2, 3):
        write(JsonlWriter(tmp_path, rotate_bytes=80), *records(step))
    assert [len(lines_of(tmp_path, name)) for name in names_in(tmp_path)] == [2, 1]


def test_the_newest_file_is_that_of_the_largest_number(tmp_path):
    for number in ("99999", "100000"):
        (tmp_path / f"metrics-{number}.jsonl").write_bytes(b'{"step":1}\n')
    write(JsonlWriter(tmp_path, rotate_bytes=20), *records(2))
    assert names_in(tmp_path) == ["metrics-100000.jsonl", "metrics-100001.jsonl", "metrics-99999.jsonl"]


def test_age_is_that_of_a_clock_that_nobody_sets(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(lines.time, "monotonic", lambda: now[0])
    with JsonlWriter(tmp_path, rotate_seconds=60) as writer:
        for passed, day in ((0, 9e9), (59, 0.0), (1, -9e9), (59, 5.0)):
            now[0] += passed
            writer.write(Record(1, day, {"loss": 1.0}))
    assert [len(lines_of(tmp_path, name)) for name in names_in(tmp_path)] == [2, 2]


def test_alarms_and_samples_are_not_rotated(tmp_path):
    with JsonlWriter(tmp_path, rotate_bytes=1, keep_last=1) as writer:
        for step in (1, 2):
            writer.write(Record(step, 0.0, {}, {"h": np.ones(BINS, int)}, {"a": "b"},
                                (Incident("A", "begin", 1, 1, 1, "m"),)))
    assert names_in(tmp_path) == ["alarms.jsonl", "histograms-00001.jsonl", "samples.jsonl"]
    assert len(lines_of(tmp_path, "alarms.jsonl")) == len(lines_of(tmp_path, "samples.jsonl")) == 2


@pytest.mark.parametrize("name", ["rotate_bytes", "rotate_seconds", "keep_last"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_a_limit_is_positive(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name} must be a positive number, but it is {value!r}. Use None for no limit"):
        JsonlWriter(tmp_path, **{name: value})


# Torn lines

def test_a_torn_last_line_is_cut_off(tmp_path):
    (tmp_path / "metrics-00000.jsonl").write_bytes(b'{"step":0}\n{"step":1,"ti')
    write(JsonlWriter(tmp_path), *records(2))
    assert lines_of(tmp_path) == [b'{"step":0}\n', b'{"step":2,"time":0.0,"loss":1.0}\n']


def test_a_whole_last_line_without_its_end_gets_it(tmp_path):
    (tmp_path / "metrics-00000.jsonl").write_bytes(b'{"step":0}\n{"step":1}')
    write(JsonlWriter(tmp_path), *records(2))
    assert lines_of(tmp_path) == [b'{"step":0}\n', b'{"step":1}\n', b'{"step":2,"time":0.0,"loss":1.0}\n']


@pytest.mark.parametrize("torn", [b"", b'{"a', b"\0" * 5000, b'{"a":' + b"1" * 200_000, b"[1]", b"7"])
@pytest.mark.parametrize("before", [b"", b'{"step":0}\n', b"\n", b'{"step":0}\n' * 20_000])
def test_repair_cuts_what_is_torn_and_nothing_else(tmp_path, before, torn):
    file = tmp_path / "alarms.jsonl"
    file.write_bytes(before + torn)
    assert lines.repair(file) == len(torn)
    assert file.read_bytes() == before
    assert lines.repair(file) == 0


def test_a_whole_last_line_gets_no_empty_line_behind_it(tmp_path):
    for step in (1, 2):
        write(JsonlWriter(tmp_path), *records(step))
    assert len(lines_of(tmp_path)) == 2


# Full disks; tests/faults has a real one

class Full:
    """`os.write` that takes so many bytes more, as a disk that fills up does; `os.ftruncate` may fail with it."""

    def __init__(self, monkeypatch, space, *, truncates=True):
        self.space, self.write, self.ftruncate, self.truncates = space, os.write, os.ftruncate, truncates
        monkeypatch.setattr(lines.os, "write", self._write)
        monkeypatch.setattr(lines.os, "ftruncate", self._ftruncate)

    def _write(self, fd, content):
        if self.space == 0:
            raise OSError(28, "No space left on device")
        taken = self.write(fd, content[:self.space])
        self.space -= taken
        return taken

    def _ftruncate(self, fd, size):
        if not self.truncates:
            raise OSError(5, "Input/output error")
        self.ftruncate(fd, size)


@pytest.mark.parametrize("space", [0, 1, 20])
def test_what_a_full_disk_cut_short_is_taken_back(tmp_path, monkeypatch, space):
    with JsonlWriter(tmp_path) as writer:
        writer.write(records(1)[0])
        disk = Full(monkeypatch, space)
        for step in (2, 3):
            with pytest.raises(OSError, match="No space left"):
                writer.write(records(step)[0])
            assert len(lines_of(tmp_path)) == 1
            disk.space = space
        disk.space = 10**6
        writer.write(records(4)[0])
    assert [document["step"] for document in documents(tmp_path)] == [1, 4]


def test_what_cannot_be_taken_back_is_repaired_when_there_is_space(tmp_path, monkeypatch):
    with JsonlWriter(tmp_path) as writer:
        writer.write(records(1)[0])
        disk = Full(monkeypatch, 20, truncates=False)
        with pytest.raises(OSError, match="No space left"):
            writer.write(records(2)[0])
        assert len(lines_of(tmp_path)[1]) == 20
        with pytest.raises(OSError):
            writer.write(records(3)[0])
        disk.space, disk.truncates = 10**6, True
        writer.write(records(4)[0])
    assert [document["step"] for document in documents(tmp_path)] == [1, 4]


def test_a_disk_that_takes_a_line_in_pieces_gets_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lines.os, "write", lambda fd, content, write=os.write: write(fd, content[:5]))
    write(JsonlWriter(tmp_path), *records(1, 2))
    assert [document["step"] for document in documents(tmp_path)] == [1, 2]


def test_a_file_that_fails_leaves_the_others_theirs(tmp_path):
    (tmp_path / "metrics-00000.jsonl").mkdir()
    writer = JsonlWriter(tmp_path)
    with pytest.raises(IsADirectoryError):
        writer.write(Record(1, 0.0, {"loss": 1.0}, {}, {"a": "b"}, (Incident("A", "begin", 1, 1, 1, "m"),)))
    assert len(lines_of(tmp_path, "alarms.jsonl")) == len(lines_of(tmp_path, "samples.jsonl")) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_device_that_is_full_raises_and_the_next_line_is_whole(tmp_path):
    file = tmp_path / "metrics-00000.jsonl"
    file.symlink_to("/dev/full")
    writer = JsonlWriter(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        writer.write(records(1)[0])
    file.unlink()  # there is space again
    write(writer, *records(2))
    assert lines_of(tmp_path) == [b'{"step":2,"time":0.0,"loss":1.0}\n']


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_alarms_wait_until_there_is_space(tmp_path):
    file = tmp_path / "alarms.jsonl"
    file.symlink_to("/dev/full")
    writer = JsonlWriter(tmp_path)
    for state in ("begin", "end"):
        incident = Incident("NonFinite", state, 1, 1, 1, "the loss is nan", "loss", math.nan, "")
        with pytest.raises(OSError, match="No space left"):
            writer.write(Record(1, 0.0, {}, alarms=(incident,)))
    writer.flush()
    file.unlink()  # there is space again
    writer.flush()
    assert [orjson.loads(line)["state"] for line in lines_of(tmp_path, "alarms.jsonl")] == ["begin", "end"]
    writer.close()


def test_a_file_that_somebody_deleted_is_made_again(tmp_path):
    with JsonlWriter(tmp_path / "run") as writer:
        writer.write(records(1)[0])
        (tmp_path / "run" / "metrics-00000.jsonl").unlink()
        (tmp_path / "run").rmdir()
        with pytest.raises(FileNotFoundError, match=r"deleted metrics-\*\.jsonl in .*run while it was written"):
            writer.flush()
        writer.flush()  # told once
        writer.write(records(2)[0])
    assert [document["step"] for document in documents(tmp_path / "run")] == [2]


# Resumes

def test_each_file_that_there_is_gets_a_mark_once(tmp_path):
    said = Record(50, 1.0, {"loss": 1.0}, {}, {"a": "b"})
    write(JsonlWriter(tmp_path), said)
    with JsonlWriter(tmp_path) as writer:
        for step in (41, 42):
            writer.start(RunInfo(resumed=True))  # once for each call of Model.train
            writer.write(Record(step, 2.0, {"loss": 3.0}))
    mark = {"step": 40, "time": 2.0, "resumed": True}
    assert [document["step"] for document in documents(tmp_path)] == [50, 40, 41, 42] and documents(tmp_path)[1] == mark
    assert documents(tmp_path, "samples.jsonl")[1:] == [mark]
    assert names_in(tmp_path) == ["metrics-00000.jsonl", "samples.jsonl"]


@pytest.mark.parametrize("record", [Record(41, 0.0, {"val/loss": 1.0}), Record(41, 0.0, {}, {}, {"a": "b"})])
def test_what_comes_after_a_step_leaves_that_step_as_it_was(tmp_path, record):
    write(JsonlWriter(tmp_path), *records(41))
    writer = JsonlWriter(tmp_path)
    writer.start(RunInfo(resumed=True))
    write(writer, record)
    assert documents(tmp_path)[1] == {"step": 41, "time": 0.0, "resumed": True}


def test_a_new_run_gets_no_mark(tmp_path):
    writer = JsonlWriter(tmp_path)
    writer.start(RunInfo())
    write(writer, *records(1))
    assert len(lines_of(tmp_path)) == 1


def test_a_mark_that_found_no_space_goes_before_the_next_line(tmp_path, monkeypatch):
    write(JsonlWriter(tmp_path), *records(50))
    writer = JsonlWriter(tmp_path)
    writer.start(RunInfo(resumed=True))
    disk = Full(monkeypatch, 5)
    with pytest.raises(OSError, match="No space left"):
        writer.write(records(41)[0])
    disk.space = 10**6
    write(writer, *records(42))
    assert [document["step"] for document in documents(tmp_path)] == [50, 40, 42]
