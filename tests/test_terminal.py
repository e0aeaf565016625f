"""`instrument tail`: a run in the terminal, from the files that another process writes."""
import math
import os
import subprocess
import sys
from pathlib import Path

from instrument import runs
from instrument.cli import main
from instrument.dashboard.terminal import tail
from instrument.record import Incident, Record
from instrument.writers import JsonlWriter, Writer

ROOT = str(Path(__file__).parents[1])
NAN = Incident("NonFinite", "begin", 2, 2, 1, "the loss is NaN", "loss", math.nan, "blocks.2")


class Memory(Writer):
    def __init__(self):
        self.told, self.totals, self.closed = [], [], 0

    def start(self, run):
        self.totals.append(run.total_steps)

    def write(self, record):
        self.told.append(record)

    def close(self):
        self.closed += 1


def record(step, **values):
    return Record(step, 100.0 + step, {"loss": 1.0 / step, **values})


def test_what_is_written_and_what_comes_is_shown_in_order_until_the_end(tmp_path):
    run = runs.create(tmp_path / "run")
    writer = JsonlWriter(run)
    writer.start(run.info())
    writer.write(record(1))
    waits = []

    def sleep(seconds):  # what the training process does meanwhile
        waits.append(seconds)
        if len(waits) == 1:
            runs.write_total_steps(run, 3)
            writer.write(Record(2, 102.0, {"loss": math.nan, "val/loss": math.inf}, alarms=(NAN,)))
        elif len(waits) == 2:
            with open(tmp_path / "run" / "metrics-00000.jsonl", "ab") as file:
                file.write(b'{"step": 3, "ti')  # a torn line
        else:
            writer.close()
            runs.write_summary(run, {"status": "stopped: NaN"})
            run.close()

    memory = Memory()
    assert tail(tmp_path / "run", memory, sleep=sleep) == "stopped: NaN"
    assert len(waits) == 3 and memory.closed == 1 and memory.totals == [None, 3]
    first, second, third = memory.told
    assert (first.step, first.values) == (1, {"loss": 1.0})
    assert second.step == 2 and math.isnan(second.values["loss"]) and second.values["val/loss"] == math.inf
    assert third.values == {} and str(third.alarms[0]) == str(NAN)


def test_a_killed_run_ends_too(tmp_path):
    code = f"""
import os, sys
sys.path.insert(0, {ROOT!r})
from instrument import runs
from instrument.record import Record
from instrument.writers import JsonlWriter
JsonlWriter(runs.create(sys.argv[1])).write(Record(1, 1.0, {{"loss": 2.0}}))
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    memory = Memory()
    assert tail(tmp_path / "run", memory) == "it left no summary" and [each.step for each in memory.told] == [1]


def test_the_command_prints_lines_in_a_pipe_and_needs_no_mindspore(tmp_path):
    with runs.create(tmp_path / "run", config={"total_steps": 40}) as run:
        writer = JsonlWriter(run)
        for step in range(1, 41):
            writer.write(record(step))
        writer.close()
        runs.write_summary(run, {"status": "finished"})
    code = ("import sys; sys.modules['mindspore'] = None\n"
            "from instrument.cli import main; sys.exit(main(['tail', sys.argv[1]]))")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": ROOT})
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0].startswith("step  1/40  loss 1.0000"), done.stderr
    assert lines[-2].startswith("step 40/40  loss 0.0250") and lines[-1] == "The run has ended: finished." and len(lines) < 30


def test_what_is_no_run_is_refused(tmp_path, capsys):
    for name in ("exp1", "exp1-2"):
        with JsonlWriter(tmp_path / name) as writer:
            writer.write(Record(1, 1.0, {"loss": 0.5}))
    assert main(["tail", str(tmp_path / "exp1-3")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("instrument tail: no run in ")
    assert f"Runs near it: {tmp_path / 'exp1-2'}, {tmp_path / 'exp1'}" in said


def test_of_a_directory_of_runs_the_newest_is_shown(tmp_path, capsys):
    for age, name in enumerate(("new", "old")):
        with JsonlWriter(tmp_path / name) as writer:
            writer.write(Record(3 + age, 1.0, {"loss": 0.5 + age}))
        (tmp_path / name / "summary.json").write_bytes(b'{"status": "finished"}')
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    assert main(["tail", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "step 3" in said and "step 4" not in said and "The run has ended: finished." in said
