"""Run directories: made once, never overwritten, resumed by one process at a time."""
import json
import os
import platform
import socket
import subprocess
import sys
import textwrap
import time
from datetime import datetime, timedelta, timezone

import mindspore as ms
import numpy as np
import orjson
import psutil
import pytest

from instrument import environment, locks, runs
from instrument.record import Record
from instrument.schema import Metric
from instrument.writers import JsonlWriter


@pytest.fixture(autouse=True)
def no_git(monkeypatch, request):
    """Looking for a commit starts a process; one test of it is enough."""
    if "repository" not in request.fixturenames:
        monkeypatch.setattr(environment, "git", lambda: None)


def config_of(run):
    return orjson.loads((run / "config.json").read_bytes())


def python(program, *arguments, **options):
    """A process of its own, which has no MindSpore."""
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)


# New runs

def test_a_new_run_says_what_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--layers", "3"])
    before = datetime.now(timezone.utc).replace(microsecond=0)
    with runs.create(tmp_path / "deep" / "first", config={"hyper_parameters": {"lr": 0.1}, "device": {"target": "CPU"}},
                     ranks=4, stage=0, stages=2, job="node0:8118") as run:
        config = config_of(run.path)
        assert run.config == config and not run.resumed and not run.renamed
    assert config["command"] == [sys.executable, "train.py", "--layers", "3"]
    assert config["versions"]["mindspore"] == ms.__version__
    assert config["versions"]["python"] == platform.python_version()
    assert before <= datetime.fromisoformat(config["start_time"]) <= datetime.now(timezone.utc)
    assert config["host"] == socket.gethostname() and config["pid"] == os.getpid()
    assert config["hyper_parameters"] == {"lr": 0.1} and config["device"] == {"target": "CPU"} and config["resumes"] == []
    assert [config[name] for name in ("rank", "ranks", "stage", "stages", "job")] == [0, 4, 0, 2, "node0:8118"]


def test_an_unknown_version_is_absent(monkeypatch):
    monkeypatch.setattr(environment, "version_of", lambda distribution: None)
    monkeypatch.setitem(sys.modules, "mindspore", None)
    assert environment.versions() == {"python": platform.python_version()}


def test_what_json_does_not_have_is_written_as_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train\udcff.py"])
    given = {"clip": float("inf"), "rate": np.float32(0.5), "path": tmp_path, 3: {"a": (1, np.int64(2))}, "big": 2**70,
             "none": None, "flag": True, "dtype": np.dtype("int8")}
    run = runs.create(tmp_path / "run", config={"hyper_parameters": given})
    config = config_of(run.path)
    assert config["hyper_parameters"] == {"clip": "inf", "rate": 0.5, "path": str(tmp_path), "3": {"a": [1, 2]},
                                          "big": str(2**70), "none": None, "flag": True, "dtype": "int8"}
    assert config["command"][1] == "train\\udcff.py" and run.config == config


def test_the_directory_does_not_move_with_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = runs.create("run")
    assert run.path == tmp_path / "run" and os.fspath(run) == str(tmp_path / "run")


def test_an_empty_directory_and_one_with_other_files_take_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("keep")
    runs.create(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "keep" and (tmp_path / "config.json").exists()


@pytest.mark.parametrize("file", ["config.json", "metrics-00000.jsonl", "metrics-00007.jsonl", "alarms.jsonl"])
def test_the_next_free_name_is_taken_and_the_older_run_left_alone(tmp_path, file):
    for name in ("exp1", "exp1-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("old")
    (tmp_path / "exp1-3").write_text("a file")
    run = runs.create(tmp_path / "exp1")
    assert run.path == tmp_path / "exp1-4" and run.renamed and not run.resumed
    assert [path.name for path in (tmp_path / "exp1").iterdir()] == [file]
    assert (tmp_path / "exp1" / file).read_text() == (tmp_path / "exp1-2" / file).read_text() == "old"


def test_a_run_that_begins_between_the_look_and_the_claim_is_not_taken(tmp_path, monkeypatch):
    seen = []
    holds = runs.holds_a_run
    monkeypatch.setattr(runs, "holds_a_run", lambda path: bool(seen) and holds(path) or seen.append(path) is not None)
    (tmp_path / "exp1").mkdir()
    (tmp_path / "exp1" / "config.json").write_text("{}")
    assert runs.create(tmp_path / "exp1").path == tmp_path / "exp1-2"
    assert seen and sorted(path.name for path in (tmp_path / "exp1").iterdir()) == ["config.json"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_in_the_place_of_the_directory_is_named(tmp_path, resume):
    (tmp_path / "run").write_text("")
    with pytest.raises(FileExistsError, match="run' is a file. Pick another name"):
        runs.create(tmp_path / "run", resume=resume)


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_below_a_file_is_refused_with_the_way_out(tmp_path, resume):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file/run' cannot be written: Not a directory. Give one on a disk"):
        runs.create(tmp_path / "file" / "run", resume=resume)


def test_a_config_that_found_no_space_leaves_no_run(tmp_path, monkeypatch):
    def full(content, **options):
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(runs.lines, "dump", full)
        with pytest.raises(OSError, match="cannot be written: No space left on device"):
            runs.create(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    assert runs.create(tmp_path / "run").path == tmp_path / "run"


def test_the_check_makes_nothing_and_refuses_what_is_there(tmp_path):
    runs.check_new(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="already holds a run.*Pick another name"):
        runs.check_new(tmp_path)
    with pytest.raises(FileExistsError, match="is a file"):
        runs.check_new(tmp_path / "config.json")


def test_the_schema_joins_the_config(tmp_path):
    run = runs.create(tmp_path)
    before = config_of(tmp_path)
    metrics = [Metric("step", "step", "global", "identical"), Metric("loss", "loss", "local", "mean")]
    added = {"schema": [{"name": "step", "unit": "step", "scope": "global", "merge": "identical"},
                        {"name": "loss", "unit": "loss", "scope": "local", "merge": "mean"}], "histograms": ["histogram/a"]}
    runs.write_schema(run, metrics, ["histogram/a"])
    assert config_of(tmp_path) == run.config == {**before, **added}
    runs.write_schema(tmp_path, metrics, max_grad_norm=1)
    assert config_of(tmp_path) == {**before, **added, "histograms": [], "max_grad_norm": 1.0}
    runs.write_schema(tmp_path, metrics)
    assert config_of(tmp_path) == {**before, **added, "histograms": []}
    run.close()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


# The commit

@pytest.fixture
def repository(tmp_path, monkeypatch):
    def git(*command):
        return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=tmp_path, check=True,
                              capture_output=True, text=True).stdout.strip()
    try:
        git("init")
    except OSError:
        pytest.skip("needs git")
    monkeypatch.chdir(tmp_path)
    return git


def test_the_commit_of_the_working_directory_is_kept(tmp_path, repository):
    (tmp_path / "train.py").write_text("1")
    assert environment.git() is None  # there is no commit yet
    repository("add", "train.py")
    repository("commit", "-m", "first")
    run = runs.create("runs/a")  # files that are not tracked do not count
    assert run.config["git"] == {"commit": repository("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "train.py").write_text("2")
    assert environment.git()["dirty"] is True


@pytest.mark.parametrize("error", [FileNotFoundError("git"), PermissionError("git"), subprocess.TimeoutExpired("git", 3)])
def test_without_git_there_is_no_commit(repository, monkeypatch, error):
    def fails(*args, **kwargs):
        raise error
    monkeypatch.setattr(environment.subprocess, "run", fails)
    assert environment.git() is None


# Resumes

def test_a_resumed_run_keeps_what_was_and_says_who_went_on(tmp_path, monkeypatch):
    first = runs.create(tmp_path / "run", config={"hyper_parameters": {"lr": 0.1}, "device": "CPU"}, ranks=2)
    first.close()
    monkeypatch.setattr(sys, "argv", ["again.py"])
    run = runs.create(tmp_path / "run", resume=True, ranks=4, job="j",
                      config={"hyper_parameters": {"lr": 0.2}, "device": "CPU"})
    assert run.resumed and not run.renamed and run.path == first.path and run.info().resumed
    entry, = run.config.pop("resumes")
    assert run.config == {**{name: value for name, value in first.config.items() if name != "resumes"}, "ranks": 4}
    assert entry.pop("time") >= first.config["start_time"]
    assert entry == {"command": [sys.executable, "again.py"], "host": socket.gethostname(), "pid": os.getpid(), "job": "j",
                     "changed": {"hyper_parameters": {"lr": 0.2}}}
    run.close()
    assert len(runs.create(tmp_path / "run", resume=True).config["resumes"]) == 2


def test_a_resume_of_nothing_is_a_new_run(tmp_path):
    run = runs.create(tmp_path / "run", resume=True)
    assert not run.resumed and run.config["resumes"] == [] and not run.info(total_steps=5).resumed
    info = run.info(total_steps=5)
    assert (info.name, info.directory, info.config, info.total_steps) == ("run", run.path, run.config, 5)


def test_a_resume_repairs_the_last_line_of_each_file(tmp_path):
    runs.create(tmp_path).close()
    files = ("metrics-00000.jsonl", "metrics-00001.jsonl", "histograms-00000.jsonl", "alarms.jsonl", "samples.jsonl")
    for name in files:
        (tmp_path / name).write_bytes(b'{"step":1}\n{"st')
    runs.create(tmp_path, resume=True)
    assert [(tmp_path / name).read_bytes() for name in files] == [b'{"step":1}\n'] * 5


@pytest.mark.parametrize("content", [b"", b'{"torn', b"[1]", None])
def test_a_resume_without_a_config_that_can_be_read_makes_one(tmp_path, content):
    (tmp_path / "metrics-00000.jsonl").write_bytes(b"{}\n")
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    run = runs.create(tmp_path, resume=True)
    assert run.resumed and config_of(tmp_path) == run.config and run.config["pid"] == os.getpid()
    if content is not None:
        assert (tmp_path / "config.json.unreadable").read_bytes() == content


# Who has it

def test_a_run_in_use_is_not_resumed_and_the_message_says_by_whom(tmp_path):
    with python("""
            import sys
            from instrument import runs
            run = runs.create(sys.argv[1])
            print(run.path, flush=True)
            input()
            run.close()
            print("closed", flush=True)
            input()
        """, tmp_path / "run") as other:
        assert other.stdout.readline().strip() == str(tmp_path / "run")
        who = f"process {other.pid} on host '{socket.gethostname()}'"
        with pytest.raises(runs.RunInUse, match=f"run' is in use by {who}. Wait"):
            runs.create(tmp_path / "run", resume=True)
        assert config_of(tmp_path / "run")["resumes"] == []
        assert runs.create(tmp_path / "run").path == tmp_path / "run-2"
        print(file=other.stdin, flush=True)
        assert other.stdout.readline() == "closed\n"
        assert runs.create(tmp_path / "run", resume=True).resumed  # though that process lives
        print(file=other.stdin, flush=True)
    assert other.returncode == 0


def test_a_run_in_use_by_this_process_is_not_resumed(tmp_path):
    run = runs.create(tmp_path)
    with pytest.raises(runs.RunInUse, match="in use by this process.*close the monitor that writes there"):
        runs.create(tmp_path, resume=True)
    run.close()
    run.close()
    runs.create(tmp_path, resume=True)


def test_a_run_that_nothing_refers_to_is_free(tmp_path):
    runs.create(tmp_path)
    with runs.create(tmp_path, resume=True) as run:
        assert run.resumed


def test_a_writer_keeps_its_run(tmp_path):
    writer = JsonlWriter(runs.create(tmp_path))
    writer.write(Record(1, 0.0, {"loss": 1.0}))
    with pytest.raises(runs.RunInUse):
        runs.create(tmp_path, resume=True)


OTHER_HOST = {"host": "elsewhere", "pid": 1, "started": 0.0}


@pytest.mark.parametrize("owner", [
    b"", b"no json", b"[]", b"{}", json.dumps(OTHER_HOST).encode(),
    json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1, "started": 0.0}).encode(),
    json.dumps({"host": socket.gethostname(), "pid": os.getppid(), "started": 0.0}).encode(),  # the number of another process
    json.dumps({"host": socket.gethostname(), "pid": "x", "started": None}).encode(),
    json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": 0.0}).encode()])  # of a container before
def test_a_lock_that_a_killed_process_left_does_not_block(tmp_path, owner):
    runs.create(tmp_path).close()
    (tmp_path / "run.lock").write_bytes(owner)
    assert locks.holder(tmp_path) is None
    assert runs.create(tmp_path, resume=True).resumed


def test_a_living_process_is_believed_though_its_lock_is_lost(tmp_path):
    parent = psutil.Process(os.getppid())
    (tmp_path / "run.lock").write_bytes(orjson.dumps(
        {"host": socket.gethostname(), "pid": parent.pid, "started": parent.create_time()}))
    with pytest.raises(runs.RunInUse, match=f"in use by process {parent.pid}"):
        runs.create(tmp_path, resume=True)


@pytest.mark.parametrize("owner, used", [
    (OTHER_HOST, True), ({}, False), ({**OTHER_HOST, "host": socket.gethostname()}, False)])
def test_without_locks_a_process_elsewhere_is_believed(tmp_path, monkeypatch, owner, used):
    def unsupported(*args):
        raise OSError(95, "Operation not supported")
    monkeypatch.setattr(locks.fcntl, "lockf", unsupported)
    runs.create(tmp_path).close()
    (tmp_path / "run.lock").write_bytes(orjson.dumps(owner))
    assert (locks.holder(tmp_path) is not None) == used
    if used:
        with pytest.raises(runs.RunInUse, match="by process 1 on host 'elsewhere'.*If it is gone .*, delete '.*run.lock'"):
            runs.create(tmp_path, resume=True)
    else:
        assert runs.create(tmp_path, resume=True).resumed


def test_without_fcntl_a_run_is_held_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "fcntl", None)
    run = runs.create(tmp_path)
    assert locks.holder(tmp_path) == {"host": socket.gethostname(), "pid": os.getpid()}
    run.close()
    assert locks.holder(tmp_path) is None


def test_a_lock_whose_file_its_owner_deletes_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    def deleted(fd, lock=locks._lock):
        monkeypatch.setattr(locks, "_lock", lock)
        (tmp_path / "run.lock").unlink()
        return lock(fd)
    monkeypatch.setattr(locks, "_lock", deleted)
    run = runs.create(tmp_path)
    assert orjson.loads((tmp_path / "run.lock").read_bytes())["pid"] == os.getpid()
    run.close()


def test_a_look_at_a_lock_does_not_end_it_nor_stand_in_its_way(tmp_path):
    run = runs.create(tmp_path)
    assert locks.holder(tmp_path)["pid"] == os.getpid()
    program = "import sys; from pathlib import Path; from instrument import locks; print(locks.holder(Path(sys.argv[1])))"
    with python(program, tmp_path) as other:
        assert f"'pid': {os.getpid()}" in other.stdout.read()
    run.close()


# Several ranks

JOB = "node0:8118"


def iso(seconds):
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()


def test_a_rank_finds_the_directory_that_rank_0_took(tmp_path):
    old = runs.create(tmp_path / "exp1", job=JOB)
    old.close()  # of this job's name, and of this minute, but nobody has it any more
    held = runs.create(tmp_path / "exp1", job=JOB, ranks=2, stages=2, stage=0)
    run = runs.follow(tmp_path / "exp1", rank=1, job=JOB, ranks=2, stages=2, stage=1, config={"device": "CPU"}, timeout=5)
    assert held.path.name == "exp1-2" and run.path == held.path / "rank_1" and not run.resumed
    assert [config_of(run.path)[name] for name in ("rank", "ranks", "stage", "stages", "job", "device")] == [
        1, 2, 1, 2, JOB, "CPU"]


def test_a_run_that_nobody_holds_is_not_followed(tmp_path):
    runs.create(tmp_path, job=JOB).close()
    with pytest.raises(TimeoutError):
        runs.follow(tmp_path, rank=1, job=JOB, timeout=0)


@pytest.mark.parametrize("change", [
    {"job": "node0:9000"}, {"start_time": iso(-3600)}, {"start_time": "yesterday"},
    {"resumes": [{"time": iso(0), "job": "other"}]}, {"resumes": [{"time": iso(-3600), "job": JOB}]}])
def test_a_run_of_another_job_or_time_is_not_followed(tmp_path, change):
    run = runs.create(tmp_path / "exp1", job=JOB)
    (run.path / "config.json").write_bytes(orjson.dumps({**run.config, **change}))
    with pytest.raises(TimeoutError, match="rank 1 waited 0 s for rank 0 of job 'node0:8118' to take .* '.*exp1'"):
        runs.follow(tmp_path / "exp1", rank=1, job=JOB, timeout=0)
    assert not (run.path / "rank_1").exists()


def test_a_rank_follows_a_resume(tmp_path):
    with runs.create(tmp_path, job=JOB), runs.follow(tmp_path, rank=3, job=JOB, timeout=0) as first:
        (first.path / "metrics-00000.jsonl").write_bytes(b'{"step":1}\n{"st')
    config = {**config_of(tmp_path), "start_time": iso(-9999)}
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    with runs.create(tmp_path, resume=True, job=JOB):
        run = runs.follow(tmp_path, rank=3, job=JOB, timeout=0)
    assert run.path == first.path and run.resumed and len(run.config["resumes"]) == 1
    assert (run.path / "metrics-00000.jsonl").read_bytes() == b'{"step":1}\n'


def test_the_newer_of_two_that_are_held_is_followed(tmp_path):
    hanging = runs.create(tmp_path / "a", job=JOB)
    (hanging.path / "config.json").write_bytes(orjson.dumps({**hanging.config, "start_time": iso(-60)}))
    held = runs.create(tmp_path / "a", job=JOB)
    assert runs.follow(tmp_path / "a", rank=1, job=JOB, timeout=0).path == held.path / "rank_1"


def test_a_rank_waits_for_rank_0(tmp_path):
    program = """
        import sys
        from instrument import runs
        print("waits", flush=True)
        print(runs.follow(sys.argv[1], rank=1, job="j", timeout=20).path, flush=True)
        input()
    """
    with python(program, tmp_path / "a") as other:
        other.stdout.readline()
        time.sleep(0.1)
        run = runs.create(tmp_path / "a", job="j")
        assert other.stdout.readline().strip() == str(run.path / "rank_1")
        print(file=other.stdin, flush=True)
