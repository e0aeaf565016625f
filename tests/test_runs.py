"""Run directories: made once, never overwritten."""
import platform
import sys

import mindspore as ms
import orjson
import pytest

from instrument import runs
from instrument.schema import Metric


def config_of(run):
    return orjson.loads((run / "config.json").read_bytes())


def test_a_new_run_says_what_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--layers", "3"])
    run = runs.create(tmp_path / "deep" / "first")
    config = config_of(run)
    assert config["command"] == [sys.executable, "train.py", "--layers", "3"]
    assert config["versions"]["mindspore"] == ms.__version__
    assert config["versions"]["python"] == platform.python_version()


def test_an_unknown_version_is_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "version_of", lambda distribution: None)
    monkeypatch.setitem(sys.modules, "mindspore", None)
    assert config_of(runs.create(tmp_path))["versions"] == {"python": platform.python_version()}


def test_the_directory_does_not_move_with_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert runs.create("run") == tmp_path / "run"


def test_an_empty_directory_and_one_with_other_files_take_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("keep")
    runs.create(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "keep" and (tmp_path / "config.json").exists()


@pytest.mark.parametrize("file", ["config.json", "metrics-00000.jsonl", "metrics-00007.jsonl"])
def test_a_directory_that_holds_a_run_is_refused_and_left_alone(tmp_path, file):
    (tmp_path / file).write_text("old")
    with pytest.raises(FileExistsError, match="already holds a run.*Pick another name"):
        runs.create(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(file, "old")]


def test_of_two_that_create_at_once_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "check_new", lambda path: None)  # both have passed the check
    runs.create(tmp_path)
    before = config_of(tmp_path)
    with pytest.raises(FileExistsError, match="already holds a run"):
        runs.create(tmp_path)
    assert config_of(tmp_path) == before


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(FileExistsError, match="run' is a file. Pick another name"):
        runs.create(tmp_path / "run")


def test_the_check_makes_nothing(tmp_path):
    runs.check_new(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_schema_joins_the_config(tmp_path):
    run = runs.create(tmp_path)
    before = config_of(run)
    runs.write_schema(run, [Metric("step", "step", "global", "identical"), Metric("loss", "loss", "local", "mean")])
    assert config_of(run) == {**before, "schema": [
        {"name": "step", "unit": "step", "scope": "global", "merge": "identical"},
        {"name": "loss", "unit": "loss", "scope": "local", "merge": "mean"}]}
    assert [path.name for path in run.iterdir()] == ["config.json"]
