"""The console script, and the demo as a user runs it."""
import math
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from instrument import cli


def run(*arguments, code=None, **kwargs):
    command = [sys.executable, *(("-c", code) if code else ("-m", "instrument.cli")), *arguments]
    path = os.pathsep.join(filter(None, [str(Path(cli.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, **kwargs)


def test_the_demo_trains_and_leaves_a_run(tmp_path):
    # From another directory: nothing may depend on where it starts.
    result = run("demo", "--steps", "12", "--run-dir", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    records = [orjson.loads(line) for line in (tmp_path / "run" / "metrics-00000.jsonl").read_bytes().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 13))
    losses = [record["loss"] for record in records]
    assert losses[0] == pytest.approx(math.log(96), abs=0.5)  # 96 characters, and nothing is known of them
    assert max(losses[-3:]) < losses[0] - 0.5
    assert all(record[name] > 0 for record in records for name in ("learning_rate", "step_time", "grad/norm"))
    assert {f"activation/rms/blocks.{i}" for i in range(4)} <= set(records[0])
    names = [metric["name"] for metric in orjson.loads((tmp_path / "run" / "config.json").read_bytes())["schema"]]
    assert set(names) - {"step"} <= set(records[0])
    assert len(list((tmp_path / "run").glob("events.out.tfevents.*"))) == 1
    for text in ("step 12/12", "largest rms", "tensorboard --logdir .", "instrument serve .", "instrument tail run",
                 f"Loss {losses[0]:.2f} at step 1, {losses[-1]:.2f} at step 12."):
        assert text in result.stdout


def test_help_and_version_load_no_mindspore():
    code = ("import sys; from instrument import cli\ntry: cli.main(sys.argv[1:])\n"
            "except SystemExit as end: assert not end.code\nassert 'mindspore' not in sys.modules")
    for arguments in (["--help"], ["demo", "--help"], ["--version"]):
        result = run(*arguments, code=code)
        assert result.returncode == 0, result.stderr
        assert "instrument" in result.stdout


def test_without_mindspore_the_install_line_is_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["demo", "--run-dir", str(tmp_path / "run")]) == 1
    assert 'pip install "mindspore-instrument[mindspore]"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_refused_before_anything_is_loaded(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "quickstart", lambda: pytest.fail("loaded"))
    (tmp_path / "metrics-00000.jsonl").write_text("")
    assert cli.main(["demo", "--run-dir", str(tmp_path)]) == 1
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["0", "-3", "1.5", "many", ""])
def test_a_number_of_steps_below_one_is_refused(steps, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["demo", f"--steps={steps}"])
    assert end.value.code == 2
    assert f"must be a whole number of at least 1, but it is {steps!r}" in capsys.readouterr().err


def test_no_command_is_an_error_that_names_the_commands(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 2 and "demo" in capsys.readouterr().err


def test_the_folder_for_mindformers_is_printed_alone():
    code = "import sys; from instrument import cli\ncli.main(sys.argv[1:])\nassert 'mindspore' not in sys.modules"
    folder = Path(run("mindformers", code=code).stdout.strip())
    assert (folder / "instrument_mf.py").is_file()
