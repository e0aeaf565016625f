"""Each example, as a user runs it: in a process of its own, from another directory."""
import json
import os
import re
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
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {"01_quickstart", "02_functional_loop", "03_several_losses"}


def test_quickstart(tmp_path):
    output = run("-c", "import importlib; importlib.import_module('01_quickstart').main(3, 'run')", cwd=tmp_path)
    lines = records(tmp_path / "run" / "metrics-00000.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[-1]["loss"] < lines[0]["loss"]
    assert "step 3/3" in output and "tensorboard --logdir" in output


def test_functional_loop(tmp_path):
    output = run(EXAMPLES / "02_functional_loop.py", cwd=tmp_path)
    losses = numbers("loss", output)
    assert losses[-1] < losses[0] / 4  # from 0.86 to 0.01 on every release
    [file] = tmp_path.glob("runs/functional-*/metrics-00000.jsonl")
    assert str(file) in output
    lines = records(file)
    assert [line["step"] for line in lines] == [1, *range(10, 121, 10)]
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=6e-5)  # printed with four digits
    assert numbers("gradient norm", output) == pytest.approx([line["grad/norm"] for line in lines], abs=6e-4)


def test_several_losses(tmp_path):
    output = run(EXAMPLES / "03_several_losses.py", cwd=tmp_path)
    totals = numbers("total", output)
    assert totals[-1] < totals[0] / 4  # from 8 to 0.3 on every release
    parts = zip(*(numbers(name, output) for name in ("objectness", "box", "class")))
    assert totals == pytest.approx([sum(row) for row in parts], abs=3e-3)  # each is printed with three digits
    assert len(totals) == len(numbers("gradient norm", output)) == 7
