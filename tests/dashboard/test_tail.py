"""Following files: each whole line once and in order, whatever happens to the files."""
import os

import pytest

from instrument.dashboard import tail
from instrument.dashboard.tail import FileTail, SeriesTail


def drain(series):
    """Everything there is now, and whether it began anew."""
    parts, restarted = [], False
    while True:
        lines = series.poll(64)
        restarted |= lines.restarted
        if not lines.content and not lines.restarted:
            return b"".join(parts), restarted
        parts.append(lines.content)


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(tail, "_LATE", 0.0)  # nothing here comes late, so nothing is waited for


def test_a_line_is_read_when_it_is_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    file = FileTail(path)
    assert file.poll().content == b""  # it appears later
    path.write_bytes(b'{"step":1}\n{"st')
    assert file.poll().content == b'{"step":1}\n'
    assert file.pending
    assert file.poll().content == b""
    with open(path, "ab") as more:
        more.write(b'ep":2}\n')
    assert file.poll().content == b'{"step":2}\n'
    assert not file.pending


def test_a_line_longer_than_a_block_is_read_as_a_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 1000 + b"\n" + b"y\n")
    file = FileTail(path)
    assert file.poll(100).content == b"x" * 1000 + b"\ny\n"
    path.write_bytes(b"x" * 1000)
    torn = FileTail(path)
    assert torn.poll(100).content == b"" and torn.pending and torn.offset == 0


@pytest.mark.parametrize("content", [b"new 1\n", b"new 1\nnew 2\nnew 3\nnew 4\n"])
def test_a_replaced_file_is_read_anew(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"old 1\nold 2\n")
    file = FileTail(path)
    file.poll()
    path.write_bytes(content)
    lines = file.poll()
    assert lines.restarted and lines.content == content


@pytest.mark.parametrize("begin_at", [False, True])
@pytest.mark.parametrize("kept", [0, 12, 1200])
def test_a_file_that_was_cut_and_is_longer_than_before_is_read_anew(tmp_path, kept, begin_at):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b"line %6d\n" % number for number in range(200)))
    file = FileTail(path)
    if begin_at:
        file.begin_at(path.stat().st_size)
    while file.poll(100).content:
        pass
    os.truncate(path, kept)
    with open(path, "ab") as more:
        more.write(b"".join(b"other %5d\n" % number for number in range(300)))
    lines = file.poll()
    assert lines.restarted and lines.content == path.read_bytes()
    assert file.poll().content == b""


def test_a_repaired_torn_line_is_no_replacement(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step":1}\n{"st')
    file = FileTail(path)
    file.poll()
    os.truncate(path, 11)
    with open(path, "ab") as more:
        more.write(b'{"step":2}\n')
    lines = file.poll()
    assert not lines.restarted and lines.content == b'{"step":2}\n'


def test_rotated_files_are_one(tmp_path, patient):
    series = SeriesTail(tmp_path / "run", "metrics-*.jsonl")
    assert drain(series) == (b"", False)  # not even the directory is there
    (tmp_path / "run").mkdir()
    for number in (9, 10, 100_000):
        (tmp_path / "run" / f"metrics-{number:05}.jsonl").write_bytes(f"{number} a\n{number} b\n".encode())
    assert drain(series) == (b"9 a\n9 b\n10 a\n10 b\n100000 a\n100000 b\n", False)
    with open(tmp_path / "run" / "metrics-100000.jsonl", "ab") as more:
        more.write(b"100000 c\n")
    (tmp_path / "run" / "metrics-100001.jsonl").write_bytes(b"100001 a\n")
    assert drain(series) == (b"100000 c\n100001 a\n", False)
    assert series.progress() == (series.progress()[1],) * 2


def test_files_that_were_read_may_be_deleted(tmp_path, patient):
    series = SeriesTail(tmp_path, "metrics-*.jsonl")
    (tmp_path / "metrics-00000.jsonl").write_bytes(b"0\n")
    assert drain(series)[0] == b"0\n"
    (tmp_path / "metrics-00001.jsonl").write_bytes(b"1\n")
    (tmp_path / "metrics-00000.jsonl").unlink()
    assert drain(series) == (b"1\n", False)


def test_a_torn_line_at_the_end_of_a_rotated_file_is_left_out(tmp_path, patient):
    (tmp_path / "metrics-00000.jsonl").write_bytes(b"0\ntorn")
    (tmp_path / "metrics-00001.jsonl").write_bytes(b"1\n")
    assert drain(SeriesTail(tmp_path, "metrics-*.jsonl")) == (b"0\n1\n", False)


def test_the_next_file_waits_for_what_is_late_in_the_one_before(tmp_path):
    series = SeriesTail(tmp_path, "metrics-*.jsonl")
    (tmp_path / "metrics-00000.jsonl").write_bytes(b"0 a\n0 ")
    (tmp_path / "metrics-00001.jsonl").write_bytes(b"1 a\n")
    assert drain(series)[0] == b"0 a\n"  # the rest of the line is not visible here yet
    with open(tmp_path / "metrics-00000.jsonl", "ab") as more:
        more.write(b"b\n")
    assert drain(series)[0] == b"0 b\n"


def test_another_run_in_the_same_directory_is_read_anew(tmp_path, patient):
    series = SeriesTail(tmp_path, "metrics-*.jsonl")
    (tmp_path / "metrics-00003.jsonl").write_bytes(b"old\n")
    drain(series)
    (tmp_path / "metrics-00003.jsonl").unlink()
    (tmp_path / "metrics-00000.jsonl").write_bytes(b"new\n")
    assert drain(series) == (b"new\n", True)
    (tmp_path / "metrics-00000.jsonl").unlink()
    assert drain(series) == (b"", True)


def test_a_fifo_and_a_directory_are_no_files_to_wait_for(tmp_path):
    os.mkfifo(tmp_path / "metrics-00000.jsonl")
    assert drain(SeriesTail(tmp_path, "metrics-*.jsonl")) == (b"", False)
    (tmp_path / "alarms.jsonl").mkdir()
    assert drain(SeriesTail(tmp_path, "alarms.jsonl")) == (b"", False)


def test_a_link_shows_no_other_file(tmp_path):
    (tmp_path / "secret.jsonl").write_bytes(b'{"step":1,"name":"a","text":"secret"}\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with pytest.raises(OSError):
        SeriesTail(tmp_path / "run", "samples.jsonl").poll()
    assert tail.read_small(tmp_path / "run" / "samples.jsonl") is None
    assert tail.read_small(tmp_path / "secret.jsonl").startswith(b'{"step"')
