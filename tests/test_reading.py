"""Reading a run back: what was written is there, in order, once; what is no record is left out and counted."""
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import instrument
from instrument import columns, parsing, runs
from instrument.bins import BINS
from instrument.record import Incident, Record, RunInfo
from instrument.writers import JsonlWriter


def write(run, *records, resumed=False, **options):
    writer = JsonlWriter(run, **options)
    writer.start(RunInfo(resumed=resumed))
    with writer:
        for record in records:
            writer.write(record)


def losses(*steps, value=1.0, **more):
    return [Record(step, 100.0 + step, {"loss": value, **more}) for step in steps]


def series(run, name="loss"):
    """`[(step, value)]` of a metric, whose arrays are what they should be."""
    step, value = run[name]
    assert step.dtype == np.int64 and value.dtype == np.float64 and len(step) == len(value)
    return list(zip(step.tolist(), value.tolist()))


def append(run, content, name="metrics-00000.jsonl"):
    with open(run / name, "ab") as file:
        file.write(content)


# Values

def test_a_metric_is_steps_and_values(tmp_path):
    write(tmp_path, Record(10, 5.0, {"loss": 2.5, "grad/norm": 0.1}), Record(20, 7.0, {"loss": 2.25, "grad/norm": 0.2}))
    run = instrument.read(tmp_path)
    assert dict(run).keys() == {"loss", "grad/norm"} and len(run) == 2 and "loss" in run and "step" not in run
    assert series(run) == [(10, 2.5), (20, 2.25)] and series(run, "grad/norm") == [(10, 0.1), (20, 0.2)]
    assert run["loss"].step.tolist() == [10, 20] and run.times.value.tolist() == [5.0, 7.0] and run.skipped == 0
    with pytest.raises(ValueError, match="read-only"):
        run["loss"].step[0] = 3


def test_a_metric_that_is_absent_at_some_steps_has_only_the_others(tmp_path):
    write(tmp_path, *(Record(step, 0.0, {"loss": float(step), **({"b": -float(step)} if step % 3 == 0 else {}),
                                         **({"a": 0.5} if step % 2 == 0 else {})}) for step in range(1, 13)))
    run = instrument.read(tmp_path)
    assert series(run) == [(step, float(step)) for step in range(1, 13)]
    assert series(run, "b") == [(3, -3.0), (6, -6.0), (9, -9.0), (12, -12.0)]
    assert series(run, "a") == [(step, 0.5) for step in range(2, 13, 2)]
    assert run.times.step.tolist() == list(range(1, 13))


def test_a_key_that_is_no_metric_names_near_ones(tmp_path):
    write(tmp_path, *losses(1))
    with pytest.raises(KeyError, match="no metric 'los' in the run .*; near names: loss. list.run. gives"):
        instrument.read(tmp_path)["los"]


NAMES = st.one_of(st.sampled_from(["loss", "a/b", "step", "time", "nonfinite", "resumed", "reserved", "größe 🙂", ""]),
                  st.text(max_size=4).filter(lambda name: name.isprintable()))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.dictionaries(NAMES, st.floats(allow_nan=True), max_size=4), min_size=1, max_size=12))
def test_whatever_is_written_is_read(tmp_path_factory, all_values):
    run = tmp_path_factory.mktemp("run")
    runs.create(run).close()
    write(run, *(Record(step, 0.0, values) for step, values in enumerate(all_values)), rotate_bytes=300)
    read = instrument.read(run)
    expected = {}
    for step, values in enumerate(all_values):
        for name, value in values.items():
            expected.setdefault(name, []).append((step, value))
    assert repr({name: series(read, name) for name in sorted(read)}) == repr(dict(sorted(expected.items())))
    assert read.skipped == 0


def test_nan_and_infinities_are_what_they_were(tmp_path):
    values = [math.nan, 1.0, math.inf, -math.inf, -0.0, 5e-324]
    write(tmp_path, *(Record(i, math.nan, {"a": value, "b": -value}) for i, value in enumerate(values)))
    run = instrument.read(tmp_path)
    np.testing.assert_array_equal(run["a"].value, values)
    np.testing.assert_array_equal(run["b"].value, np.negative(values))
    assert np.isnan(run.times.value).all()


# Files and lines

def test_files_follow_each_other_by_their_number(tmp_path):
    for number, step in (("00002", 2), ("99999", 3), ("100000", 4)):
        append(tmp_path, b'{"step":%d,"time":1.0,"loss":%d}\n' % (step, step), f"metrics-{number}.jsonl")
    append(tmp_path, b'{"step":9,"time":1.0,"loss":9}\n', "metrics-9.jsonl.bak")
    assert series(instrument.read(tmp_path)) == [(2, 2.0), (3, 3.0), (4, 4.0)]


@pytest.mark.parametrize("junk, skipped", [
    (b'{"step":7,"time":1.0,"lo\n', 1), (b'{"step":7,"ti{"step":8,"time":1.0,"loss":1.0}\n', 1),
    (b'{"step":7,"time":1.0,"loss":1.0}{"step":8,"time":1.0,"loss":1.0}\n', 1), (b"\n\n", 2), (b"\0" * 100 + b"\n", 1),
    (b"\xff\xfe\n", 1), (b'["step","time","loss"]\n', 1), (b"7\n", 1), (b"null\n", 1), (b"{}\n", 1),
    (b'{"time":1.0,"loss":1.0}\n', 1), (b'{"step":"7","time":1.0,"loss":1.0}\n', 1),
    (b'{"step":7.5,"time":1.0,"loss":1.0}\n', 1),
    (b'{"step":null,"time":1.0,"loss":1.0}\n', 1), (b'{"step":99999999999999999999,"time":1.0,"loss":1.0}\n', 1),
    (b'{"step":7,"time":1.0,"loss":NaN}\n', 1), (b'{"step":7,"time":1.0,"nonfinite":3}\n', 1),
    (b'{"step":7,"time":1.0,"text":"x","list":[1],"object":{"loss":1}}\n', 0)])
def test_what_is_no_record_is_left_out_and_counted(tmp_path, junk, skipped):
    write(tmp_path, *losses(1))
    append(tmp_path, junk)
    append(tmp_path, b'{"step":2,"time":1.0,"loss":1.0}\n')
    run = instrument.read(tmp_path)
    assert series(run) == [(1, 1.0), (2, 1.0)] and list(run) == ["loss"] and run.skipped == skipped


def test_a_line_of_another_hand_counts_as_far_as_it_has_numbers(tmp_path):
    append(tmp_path, b'{"loss":1,"step":1}\n{"step":2,"time":null,"loss":null,"note":"x","ok":true}\n')
    run = instrument.read(tmp_path)
    assert repr(series(run)) == "[(1, 1.0), (2, nan)]" and series(run, "ok") == [(2, 1.0)] and run.skipped == 0


def test_a_run_can_be_read_while_it_is_written(tmp_path):
    line = b'{"step":2,"time":1.0,"loss":4.0}'
    for length in range(len(line) + 1):
        (tmp_path / "metrics-00000.jsonl").write_bytes(b'{"step":1,"time":1.0,"loss":1.0}\n' + line[:length])
        run = instrument.read(tmp_path)
        whole = length == len(line)  # but for its newline
        assert series(run) == [(1, 1.0)] + [(2, 4.0)] * whole and run.skipped == (0 < length < len(line))


def test_a_file_that_is_deleted_meanwhile_is_left_out(tmp_path, monkeypatch):
    write(tmp_path, *losses(1, 2, 3), rotate_bytes=1)
    numbered = runs.lines.numbered

    def then_deleted(*args):
        files = numbered(*args)
        if len(files) == 3:
            files[0].unlink()
        return files
    monkeypatch.setattr(runs.lines, "numbered", then_deleted)
    assert series(instrument.read(tmp_path)) == [(2, 1.0), (3, 1.0)]


def test_the_time_of_day_orders_nothing(tmp_path):
    write(tmp_path, *(Record(step, -1e9 * step, {"loss": float(step)}) for step in range(1, 5)), rotate_bytes=80)
    run = instrument.read(tmp_path)
    assert series(run) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)] and run.times.value[3] == -4e9


def test_metrics_of_training_and_of_validation_at_one_step_both_count(tmp_path):
    write(tmp_path, Record(1, 0.0, {"loss": 1.0}), Record(1, 0.0, {"val/loss": 2.0}), Record(2, 0.0, {"loss": 3.0}))
    run = instrument.read(tmp_path)
    assert series(run) == [(1, 1.0), (2, 3.0)] and series(run, "val/loss") == [(1, 2.0)]


def test_of_several_values_at_one_step_the_last_written_counts(tmp_path):
    write(tmp_path, *losses(1, 2, 3), *losses(2, value=9.0), *losses(3, value=8.0, more=1.0))
    assert series(instrument.read(tmp_path)) == [(1, 1.0), (2, 9.0), (3, 8.0)]
    write(tmp_path, *losses(3, value=7.0))  # with the names of the first lines, not of the last
    assert series(instrument.read(tmp_path)) == [(1, 1.0), (2, 9.0), (3, 7.0)]


# Resumes

@pytest.mark.parametrize("rotate", [40, 10**6])
def test_steps_that_were_made_again_are_those_of_the_later_process(tmp_path, rotate):
    write(tmp_path, *losses(*range(1, 11), value=1.0, old=1.0), rotate_bytes=rotate)
    write(tmp_path, *losses(6, 7, value=2.0), rotate_bytes=rotate, resumed=True)
    write(tmp_path, *losses(7, 8, value=3.0), rotate_bytes=rotate, resumed=True)
    run = instrument.read(tmp_path)
    assert series(run) == [(step, 1.0) for step in range(1, 6)] + [(6, 2.0), (7, 3.0), (8, 3.0)]
    assert series(run, "old") == [(step, 1.0) for step in range(1, 6)] and run.times.step.tolist() == list(range(1, 9))


def test_a_resume_behind_the_last_step_drops_nothing(tmp_path):
    write(tmp_path, *losses(1, 2, 3))
    write(tmp_path, *losses(4, 5), resumed=True)
    assert [step for step, _ in series(instrument.read(tmp_path))] == [1, 2, 3, 4, 5]


def test_other_lines_of_steps_that_were_made_again_are_dropped_too(tmp_path):
    def record(step, text):
        return Record(step, 0.0, {"loss": 1.0}, {"h": np.full(BINS, step)}, {"a": text},
                      (Incident("A", "begin", step, step, 1, text),))
    write(tmp_path, *(record(step, "old") for step in (1, 2, 3)), rotate_bytes=400)
    write(tmp_path, *losses(2), resumed=True, rotate_bytes=400)
    write(tmp_path, record(5, "new"), rotate_bytes=400)
    run = instrument.read(tmp_path)
    assert [(text["step"], text["text"]) for text in run.texts] == [(1, "old"), (5, "new")]
    assert [(alarm["step"], alarm["message"]) for alarm in run.alarms] == [(1, "old"), (5, "new")]
    assert run.histograms["h"].step.tolist() == [1, 5] and run.skipped == 0
    assert run.histograms["h"].counts.tolist() == [[1] * BINS, [5] * BINS]


# What is not a metric

def test_alarms_texts_and_histograms_are_what_they_were(tmp_path):
    counts = np.zeros(BINS, np.int64)
    counts[[3, BINS - 1]] = 2**60 + 1, 5
    incident = Incident("NonFinite", "begin", 4, 5, 2, "blocks.1 is not finite", metric="loss", value=math.inf,
                        where="blocks.1")
    write(tmp_path, Record(5, 9.0, {}, {"a": counts, "none": np.zeros(BINS, np.int64)}, {"poem": "ä\n\u2028b"}, (incident,)),
          Record(6, 9.5, {}, {"a": counts * 2}))
    append(tmp_path, b'{"step":7', "alarms.jsonl")
    append(tmp_path, b"7\n[]\n", "histograms-00000.jsonl")
    run = instrument.read(tmp_path)
    assert run.alarms == [{"step": 5, "time": 9.0, "alarm": "NonFinite", "state": "begin", "first_step": 4, "last_step": 5,
                           "steps": 2, "message": "blocks.1 is not finite", "metric": "loss", "value": math.inf,
                           "where": "blocks.1"}]
    assert run.texts == [{"step": 5, "time": 9.0, "name": "poem", "text": "ä\n\u2028b"}]
    assert run.skipped == 1
    step, found = run.histograms["a"]
    assert step.tolist() == [5, 6] and found.dtype == np.int64
    np.testing.assert_array_equal(found, [counts, counts * 2])
    assert run.histograms["none"].step.tolist() == [5] and not run.histograms["none"].counts.any()
    assert run.skipped == 3 and list(run) == []


def test_the_config_is_there_and_a_run_without_records_is_empty(tmp_path):
    made = runs.create(tmp_path, config={"hyper_parameters": {"lr": 0.1}})
    run = instrument.read(made)
    assert run.config == made.config and len(run) == 0 and run.alarms == run.texts == [] and not run.histograms
    assert run.times.step.tolist() == [] and run.path == tmp_path and len(run.ranks) == 0
    (tmp_path / "config.json").write_text("{")
    assert instrument.read(tmp_path).config == {}


# Ranks

def pipeline(path, losses_of, stages=2):
    """Runs of all ranks, two a stage; `losses_of` says which rank wrote which loss."""
    for rank in range(2 * stages):
        directory = path / f"rank_{rank}" if rank else path
        runs.create(directory, rank=rank, ranks=2 * stages, stage=rank // 2, stages=stages).close()
        if rank in losses_of:
            write(directory, Record(1, 0.0, {"loss": losses_of[rank], "loss/a": losses_of[rank], "grad/norm": float(rank)}))


def test_the_loss_of_a_pipeline_is_that_of_its_last_stage(tmp_path):
    pipeline(tmp_path, {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0})
    run = instrument.read(tmp_path)
    assert series(run) == series(run, "loss/a") == [(1, 2.0)] and series(run, "grad/norm") == [(1, 0.0)]
    assert sorted(run) == ["grad/norm", "loss", "loss/a"]
    assert series(run.ranks[1]) == [(1, 1.0)]


def test_without_the_last_stage_a_pipeline_has_no_loss(tmp_path):
    runs.create(tmp_path, stage=0, stages=2).close()
    write(tmp_path, *losses(1, more=5.0))
    run = instrument.read(tmp_path)
    assert list(run) == ["more"] and "loss" not in run
    with pytest.raises(KeyError, match="no metric 'loss'"):
        run["loss"]


def test_the_ranks_are_read_when_they_are_asked_for(tmp_path, monkeypatch):
    for name in ("rank_1", "rank_10", "rank_2"):
        write(tmp_path / name, *losses(int(name[5:])))
    write(tmp_path, *losses(0))
    (tmp_path / "rank_3").mkdir()
    (tmp_path / "rank_x").mkdir()
    run = instrument.read(tmp_path)
    assert list(run.ranks) == [1, 2, 10] and len(run.ranks) == 3 and 10 in run.ranks and 3 not in run.ranks
    assert series(run.ranks[10]) == [(10, 1.0)] and run.ranks[10] is run.ranks[10]
    with pytest.raises(KeyError, match="no rank 3 in the run .*there are: .1, 2, 10."):
        run.ranks[3]


# No run

def test_a_path_without_a_run_names_those_beside_it(tmp_path):
    for name in ("exp1", "exp1-2", "other"):
        runs.create(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no run in '.*exp1-3': .*Runs near it: .*exp1") as error:
        instrument.read(tmp_path / "exp1-3")
    assert "other" not in str(error.value)
    os.utime(tmp_path / "exp1-2" / "config.json", (2e9, 2e9))
    with pytest.raises(FileNotFoundError, match="runs are in it. The newest of them: .*exp1-2; others: .*exp1, .*other.$"):
        instrument.read(tmp_path)
    with pytest.raises(FileNotFoundError, match="Runs near it: none.$"):
        instrument.read(tmp_path / "no" / "where")


def test_reading_needs_no_mindspore(tmp_path):
    write(tmp_path, *losses(1))
    program = ("import sys, instrument; run = instrument.read(sys.argv[1]); assert run['loss'].value[0] == 1.0; "
               "assert 'mindspore' not in sys.modules")
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


# Large runs: the ways that a small one does not take

def mixed(run):
    """Lines of several kinds in several files, and what `read` makes of them in one process and one piece."""
    runs.create(run).close()
    records = [Record(step, 0.0, {"loss": math.nan if step % 7 == 0 else float(step),
                                  **({"b": step / 2} if step % 5 == 0 else {})}) for step in range(1, 400)]
    write(run, *records, rotate_bytes=3000)
    write(run, *losses(*range(300, 420), value=-1.0), resumed=True, rotate_bytes=3000)
    append(run, b"torn\n")
    expected = instrument.read(run, processes=1)
    assert expected.skipped == 1 and expected["loss"].step.tolist() == list(range(1, 420))
    return expected


def same(a, b):
    assert list(a) == list(b) and a.skipped == b.skipped
    for name in a:
        np.testing.assert_array_equal(a[name].step, b[name].step)
        np.testing.assert_array_equal(a[name].value, b[name].value)
    np.testing.assert_array_equal(a.times, b.times)


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_read_what_one_does(tmp_path, monkeypatch, processes):
    expected = mixed(tmp_path)
    monkeypatch.setattr(parsing, "_SHARE", 1000)
    helped = []
    monkeypatch.setattr(parsing, "_result", lambda helper, result=parsing._result: helped.append(result(helper)) or helped[-1])
    same(expected, instrument.read(tmp_path, processes=processes))
    assert len(helped) == processes - 1 and all(isinstance(part, parsing.Part) and part.lines for part in helped)


@pytest.mark.parametrize("executable", ["", "/nowhere/python", "/bin/false", "/bin/echo"])
def test_where_no_helper_starts_one_process_reads_all(tmp_path, monkeypatch, executable):
    expected = mixed(tmp_path)
    monkeypatch.setattr(parsing, "_SHARE", 1000)
    monkeypatch.setattr(sys, "executable", executable)
    same(expected, instrument.read(tmp_path, processes=3))


@pytest.mark.parametrize("shares", range(1, 40))
def test_shares_cut_anywhere_have_each_line_once(tmp_path, shares):
    lines = [b'{"step":%d,"time":0.0,"loss":%d}\n' % (step, step) for step in range(8)]
    sizes = []
    for number, some in enumerate((lines[:3], [], lines[3:4], lines[4:])):
        file = tmp_path / str(number)
        file.write_bytes(b"".join(some))
        sizes.append((str(file), file.stat().st_size))
    parts = [parsing.parse(share) for share in parsing.divide(sizes, shares)]
    step, value = columns.Columns(parts)["loss"]
    assert step.tolist() == list(range(8)) and value.tolist() == list(range(8)) and sum(part.lines for part in parts) == 8


@pytest.mark.parametrize("layouts", [0, 1, 3])
def test_names_that_change_with_each_line_are_read_all_the_same(tmp_path, monkeypatch, layouts):
    random = np.random.default_rng(0)
    write(tmp_path, *(Record(step, float(step), {f"m{i}": step + i / 8 for i in range(6) if random.random() < 0.5})
                      for step in range(1, 200)))
    write(tmp_path, *(Record(step, -1.0, {f"m{i}": math.inf for i in range(6) if random.random() < 0.5})
                      for step in range(150, 260)), resumed=True)
    expected = instrument.read(tmp_path)
    monkeypatch.setattr(parsing, "_LAYOUTS", layouts)
    monkeypatch.setattr(parsing, "_BATCH", 1000)
    read = instrument.read(tmp_path)
    assert sorted(read) == sorted(expected)
    for name in expected:
        np.testing.assert_array_equal(read[name].step, expected[name].step)
        np.testing.assert_array_equal(read[name].value, expected[name].value)
    np.testing.assert_array_equal(read.times, expected.times)


def test_a_large_integer_step_is_exact(tmp_path):
    write(tmp_path, *losses(2**53 + 1, 2**62))
    assert [step for step, _ in series(instrument.read(tmp_path))] == [2**53 + 1, 2**62]
