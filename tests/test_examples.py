"""Each example, as a user runs it: in a process of its own, from another directory."""
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import instrument

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*arguments, cwd):
    # The package that this process tests, wherever it lies.
    path = [str(Path(instrument.__file__).parents[1]), str(EXAMPLES), os.environ.get("PYTHONPATH")]
    result = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))})
    assert result.returncode == 0, result.stderr
    return result.stdout


def numbers(name, output):
    """What follows `name` in each line that has it."""
    return [float(text) for text in re.findall(rf"^step.*\b{name} ([0-9.]+)", output, re.MULTILINE)]


def records(file):
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def test_every_example_has_a_test():
    there = {file.stem for file in EXAMPLES.glob("*.py")}
    assert there == {"01_quickstart", "02_functional_loop", "03_several_losses", "04_resume", "05_mindformers",  # in tests/mf
                     "06_pynative", "07_six_failures"}


def test_quickstart(tmp_path):
    output = run("-c", "import importlib; importlib.import_module('01_quickstart').main(3, 'run')", cwd=tmp_path)
    lines = records(tmp_path / "run" / "metrics-00000.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[-1]["loss"] < lines[0]["loss"]
    assert "step 3/3" in output and "tensorboard --logdir" in output


def test_functional_loop(tmp_path):
    output = run(EXAMPLES / "02_functional_loop.py", cwd=tmp_path)
    losses = numbers("loss", output)
    assert losses[-1] < losses[0] / 4  # from 0.59 to 0.01 on every release
    [file] = tmp_path.glob("runs/functional-*/metrics-00000.jsonl")
    assert str(file.parent) in output
    lines = records(file)
    assert [line["step"] for line in lines] == [*range(10, 121, 10)]
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=6e-5)  # printed with four digits
    assert numbers("gradient norm", output) == pytest.approx([line["grad/norm"] for line in lines], abs=6e-4)


def test_several_losses(tmp_path):
    output = run(EXAMPLES / "03_several_losses.py", cwd=tmp_path)
    totals, parts = numbers("total", output), [numbers(name, output) for name in ("class", "box", "giou")]
    assert len(totals) == len(numbers("gradient norm", output)) == 11 and totals[-1] < totals[0] / 4  # from 12 to 1
    assert totals == pytest.approx([sum(row) for row in zip(*parts)], abs=3e-3)  # each is printed with three digits
    assert all(part[-1] < part[0] / 2 for part in parts)
    before, after = (float(text) for text in re.findall(r"^mean IoU .* ([0-9.]+)$", output, re.MULTILINE))
    assert before < 0.2 and after > 0.6  # from 0.04 to 0.7 on every release
    entropy = numbers("entropy of attention", output)
    assert entropy[-1] < entropy[0] - 0.1 and entropy[0] <= 1.39  # ln 4: even over the points


def test_resume(tmp_path):
    output = run(EXAMPLES / "04_resume.py", cwd=tmp_path)
    pre_training = re.search(r"loss ([0-9.]+) at first, ([0-9.]+) in the end", output)
    assert pre_training and float(pre_training[2]) < float(pre_training[1]) / 4  # from 1 to 0.01

    [directory] = tmp_path.glob("runs/resume-*")
    made = instrument.read(directory)
    steps, losses = made["loss"]
    assert steps.tolist() == list(range(1, 121)) and losses[-1] < losses[0] / 4
    lines = records(directory / "metrics-00000.jsonl")
    numbered = [line["step"] for line in lines if "loss" in line]
    assert numbered == [*range(1, 61), *range(51, 121)]  # 51 to 60 were made twice
    assert [line["step"] for line in lines if line.get("resumed")] == [50]
    assert made["learning_rate"].value == pytest.approx([0.03 * (1 - i / 120) for i in range(120)], rel=1e-5)  # float32

    first, again = ({line["step"]: line["loss"] for line in part if "loss" in line} for part in (lines[:60], lines[60:]))
    assert all(first[step] == pytest.approx(again[step], rel=1e-6) for step in range(51, 61))  # no seam: rounding at most
    table = [[float(text) for text in row] for row in re.findall(
        r"^step +(\d+)  loss before the crash ([0-9.]+)  of the whole run ([0-9.]+)", output, re.MULTILINE)]
    assert [row[0] for row in table] == [1, 20, 40, *range(49, 61)]
    assert all(before == pytest.approx(first[step], abs=1e-6) and before == pytest.approx(after, abs=2e-6)
               for step, before, after in table)

    frozen = made["weight/norm/body.0.weight"].value
    assert (frozen == frozen[0]).all() and "grad/norm/body.0.weight" not in made and "grad/norm/head.weight" in made
    assert "training goes on with step 51" in output and "grad/norm/body.0.weight is not there" in output


def test_pynative(tmp_path):
    output = run(EXAMPLES / "06_pynative.py", cwd=tmp_path)
    lines = output.splitlines()
    losses = numbers("loss", output)
    assert len(losses) == 5 and losses[-1] < losses[0] / 2  # of the steps before
    assert lines[-3] == "in Normalise.construct: rows [7] of 32 have the length 0"
    assert lines[-2].startswith("step 25  loss nan") and lines[-2].endswith("of normalise nan")
    assert lines[-1] == ("first not finite: activation normalise (after activation act, which was finite; what lies "
                         "between them was not measured)")


def first_starved(run, records):
    """The step from which half of the time of the last records was spent waiting for data, in float64."""
    (steps, share), times = run["data_wait_fraction"], run["step_time"]
    assert steps.tolist() == times.step.tolist()
    waits = share * times.value
    return next(int(steps[end - 1]) for end in range(records + 1, len(steps) + 1)  # the first record has compilation in it
                if waits[end - records:end].sum() >= times.value[end - records:end].sum() / 2)


def test_six_failures(tmp_path):
    output = run(EXAMPLES / "07_six_failures.py", "--run-dir", "failures", cwd=tmp_path)
    table = output[output.index("run   "):].split("\n\n")[0].splitlines()[1:]
    rows = {row.split()[0]: row.split()[1:5] for row in table}
    assert list(rows) == ["healthy", "explosion", "learning-rate", "starving", "overfitting", "nan", "dead"]
    told = {name: int(row[2]) for name, row in rows.items() if row[2] != "-"}
    assert rows["explosion"][:3] == ["GradientSpike", "51", "51"] and rows["explosion"][3].endswith(".weight")
    assert rows["learning-rate"] == ["LearningRate", "51", "51", "-"]
    assert rows["starving"][:2] == ["DataStarved", "51"]
    assert rows["overfitting"][0] == "Overfitting" and told["overfitting"] >= int(rows["overfitting"][1]) + 30  # three rises
    assert rows["nan"] == ["NonFinite", "51", "51", "_backbone.log"]
    assert rows["dead"][0] == "DeadLayer" and rows["dead"][3] in ("_backbone.act1", "_backbone.act2")
    assert told["dead"] == int(rows["dead"][1]) + 19  # the twentieth record

    # What the table says is what was recorded.
    runs = {name: instrument.read(tmp_path / "failures" / name) for name in rows}
    for name, run_data in runs.items():
        begun = [(each["alarm"], each["first_step"]) for each in run_data.alarms if each["state"] == "begin"]
        assert (rows[name][0], told.get(name)) in begun or name == "healthy"
    assert told["starving"] == first_starved(runs["starving"], records=20)  # 51 or soon after, but the machine may stall
    waits = runs["starving"]["data_wait"].value
    assert statistics.median(waits[60:]) > 0.05 > statistics.median(waits[5:50])
    timed = {"DataStarved", "ThroughputDrop"}  # this machine may be busy
    assert {each["alarm"] for each in runs["healthy"].alarms} <= timed and runs["healthy"]["loss"].value[-1] < 0.5
    assert runs["healthy"]["loss"].value[:50].tolist() == runs["explosion"]["loss"].value[:50].tolist()  # until then the same
    assert "instrument serve failures" in output and "instrument compare failures/healthy failures/explosion" in output
