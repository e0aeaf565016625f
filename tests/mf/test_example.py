"""The example, as a user runs it, with fewer steps."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_mindformers.py"


def test_example(trainer, tmp_path):
    if trainer.TrainingStateMonitor is None:  # up to 1.3.2
        pytest.skip("this MindFormers wants more settings than the example's")
    path = os.pathsep.join(filter(None, [str(EXAMPLE.parents[1]), os.environ.get("PYTHONPATH")]))
    result = subprocess.run([sys.executable, str(EXAMPLE), "--steps", "20"], cwd=tmp_path, capture_output=True, text=True,
                            env={**os.environ, "PYTHONPATH": path})
    assert result.returncode == 0, result.stderr[-3000:]
    [file] = tmp_path.glob("runs/mindformers/metrics-*.jsonl")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    lines = [line for line in lines if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5  # 4.9 at first, about 3.5
    wanted = {"grad/norm", "weight/norm", "learning_rate", "tokens_per_second", "perplexity", "activation/rms/model.layers.0"}
    assert wanted <= set(lines[-1])
    assert "def " in (file.parent / "samples.jsonl").read_text("utf-8")
    assert list(file.parent.glob("histograms-*.jsonl")) and list(file.parent.glob("events.out.tfevents.*"))
