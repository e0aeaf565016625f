"""What happens to the files of a run when a process is killed, the disk is full or read-only, or two want the same."""
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import instrument
from instrument import runs
from instrument.record import Incident, Record
from instrument.writers import JsonlWriter


def start(program, *arguments):
    """A process of its own, which has no MindSpore."""
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.fixture
def disk(tmp_path):
    """Mounts a small disk in memory; only root may."""
    mounted = []

    def mount(options):
        directory = tmp_path / f"disk{len(mounted)}"
        directory.mkdir()
        result = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)],
                                capture_output=True, text=True)
        if result.returncode != 0:
            pytest.skip(f"needs to mount a disk: {result.stderr.strip()}")
        mounted.append(directory)
        return directory
    if not sys.platform.startswith("linux"):
        pytest.skip("needs tmpfs")
    yield mount
    for directory in mounted:
        # Lazily: the traceback of an expected error may hold a file until it is collected.
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def record(step, padding=0):
    incident = Incident("A", "begin", step, step, 1, "m" * padding)
    return Record(step, 0.0, {"loss": float(step), "a" * max(padding, 1): 1.0}, {}, {"text": str(step)}, (incident,))


# Killed

def test_a_writer_that_is_killed_50_times_loses_nothing_that_it_had_written(tmp_path):
    killed = subprocess.run([sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path / "run"), "50", "1"],
                            capture_output=True, text=True, timeout=120)
    assert killed.stderr == ""
    result = json.loads(killed.stdout)
    assert result["lost"] == [] and result["torn"] <= 1 and result["resumes"] == 49 and result["steps"] > 500
    assert result["files"] > 6  # it was rotated meanwhile


def test_a_killed_process_keeps_no_run_though_its_workers_live_on(tmp_path):
    # The worker is a fork, as those of a dataset are, and one that no hook of Python sees: it has all descriptors.
    with start("""
            import os, sys, time
            from instrument import runs
            from instrument.record import Record
            from instrument.writers import JsonlWriter
            writer = JsonlWriter(runs.create(sys.argv[1]))
            writer.write(Record(1, 0.0, {"loss": 1.0}))
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
            print(worker, flush=True)
            time.sleep(60)
        """, tmp_path) as parent:
        worker = int(parent.stdout.readline())
        try:
            with pytest.raises(runs.RunInUse, match=f"by process {parent.pid}"):
                runs.create(tmp_path, resume=True)
            parent.kill()
            parent.wait()
            os.kill(worker, 0)  # it lives
            assert runs.create(tmp_path, resume=True).resumed
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_worker_that_ends_takes_nothing_from_its_parent(tmp_path):
    # It ends as a program does, with its finalizers, and closes what it has of the writer and the run.
    with start("""
            import os, sys
            from instrument import runs
            from instrument.record import Record
            from instrument.writers import JsonlWriter
            run = runs.create(sys.argv[1])
            writer = JsonlWriter(run)
            writer.write(Record(1, 0.0, {"loss": 1.0}))
            if os.fork() == 0:
                writer.close()
                run.close()
                sys.exit()
            os.wait()
            writer.write(Record(2, 0.0, {"loss": 2.0}))
            print(flush=True)
            input()
        """, tmp_path) as parent:
        parent.stdout.readline()
        with pytest.raises(runs.RunInUse, match=f"by process {parent.pid}"):
            runs.create(tmp_path, resume=True)
        print(file=parent.stdin, flush=True)
    assert parent.returncode == 0
    assert (tmp_path / "metrics-00000.jsonl").read_bytes().count(b"\n") == 2


def test_processes_forked_while_one_writes_write_whole_lines(tmp_path):
    with start("""
            import os, sys, threading
            from instrument.record import Record
            from instrument.writers import JsonlWriter
            writer = JsonlWriter(sys.argv[1])
            writer.write(Record(1, 0.0, {"loss": 1.0}))
            def background():
                for step in range(2, 1001):
                    writer.write(Record(step, 0.0, {"loss": float(step)}))
            thread = threading.Thread(target=background)
            thread.start()
            for worker in range(20):
                if os.fork() == 0:
                    for i in range(20):
                        writer.write(Record(2000 + 20 * worker + i, 0.0, {"loss": 0.0}))
                    sys.exit()
            thread.join()
            for _ in range(20):
                os.wait()
        """, tmp_path) as parent:
        pass
    assert parent.returncode == 0
    run = instrument.read(tmp_path)
    assert run["loss"].step.tolist() == [*range(1, 1001), *range(2000, 2400)] and run.skipped == 0
    assert (tmp_path / "metrics-00000.jsonl").read_bytes().count(b"\n") == 1400  # nothing twice


# Two at once

def at_once(number, program, path):
    """What so many processes answer that do the same at one moment, and live on until all have answered."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(start(program, path)) for _ in range(number)]
        for process in processes:
            process.stdout.readline()
        for process in processes:
            print(file=process.stdin, flush=True)
        answers = [process.stdout.readline().strip() for process in processes]
        for process in processes:
            print(file=process.stdin, flush=True)
    return answers


def test_processes_that_start_at_once_get_directories_of_their_own(tmp_path):
    program = """
        import sys
        from instrument import runs
        print(flush=True)
        input()
        print(runs.create(sys.argv[1]).path, flush=True)
        input()
    """
    taken = [Path(answer).name for answer in at_once(4, program, tmp_path / "exp1")]
    assert sorted(taken) == ["exp1", "exp1-2", "exp1-3", "exp1-4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(taken)


def test_of_processes_that_resume_one_run_at_once_one_has_it(tmp_path):
    runs.create(tmp_path / "exp1").close()
    program = """
        import sys
        from instrument import runs
        print(flush=True)
        input()
        try:
            run = runs.create(sys.argv[1], resume=True)
            print("has it", flush=True)
        except runs.RunInUse:
            print("refused", flush=True)
        input()
    """
    answers = at_once(3, program, tmp_path / "exp1")
    assert sorted(answers) == ["has it", "refused", "refused"]
    assert len(runs.read_config(tmp_path / "exp1")["resumes"]) == 1


# Disks

def fill(directory):
    """Take all the space that there is, in a file."""
    ballast = directory / "ballast"
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0" * 512)
    return ballast


def test_a_full_disk_loses_what_it_refused_and_nothing_else(disk):
    directory = disk("size=256k")
    with runs.create(directory / "run") as run, JsonlWriter(run, rotate_bytes=20_000) as writer:
        written, refused = [], []
        for step in range(1, 2000):
            try:
                writer.write(record(step, 300))
                written.append(step)
            except OSError as error:
                assert "No space left" in str(error)
                refused.append(step)
                if len(refused) == 20:
                    break
        assert written and len(refused) == 20
        full = instrument.read(run)
        assert full.skipped == 0 and set(written) <= set(full["loss"].step.tolist())
        for old in sorted((directory / "run").glob("metrics-*"))[:3]:
            old.unlink()  # somebody makes space
        for step in range(3000, 3010):
            writer.write(record(step, 300))
    read = instrument.read(run)
    assert read.skipped == 0 and read["loss"].step[-10:].tolist() == list(range(3000, 3010))
    assert [text["step"] for text in read.texts][-10:] == list(range(3000, 3010))
    for file in (directory / "run").glob("*.jsonl"):
        assert file.read_bytes().endswith(b"\n")


def test_a_run_cannot_begin_on_a_full_disk_and_can_when_there_is_space(disk):
    directory = disk("size=64k")
    ballast = fill(directory)
    with pytest.raises(OSError, match="run' cannot be written: No space left on device. Give one on a disk that has space"):
        runs.create(directory / "run")
    ballast.unlink()
    with runs.create(directory / "run") as run:
        assert run.path == directory / "run"


def test_a_run_on_a_full_disk_is_resumed_when_there_is_space(disk):
    directory = disk("size=64k")
    with runs.create(directory / "run") as run, JsonlWriter(run) as writer:
        writer.write(record(1))
    config = runs.read_config(run)
    with open(directory / "run" / "metrics-00000.jsonl", "ab") as file:
        file.write(b'{"step":2,"ti')
    ballast = fill(directory)
    with pytest.raises(OSError, match="No space left on device"):
        runs.create(directory / "run", resume=True)
    assert runs.read_config(run) == config
    ballast.unlink()
    with runs.create(directory / "run", resume=True) as run:
        assert run.resumed and len(run.config["resumes"]) == 1
    assert instrument.read(run).skipped == 0


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs limits of POSIX")
def test_a_file_that_reaches_the_limit_of_its_size_is_sound(tmp_path):
    with start(f"""
            import json, resource, sys
            from instrument.record import Record
            from instrument.writers import JsonlWriter
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))
            writer, refused = JsonlWriter(sys.argv[1]), 0
            for step in range(1, 100):
                try:
                    writer.write(Record(step, 0.0, {{"loss": 1.0}}))
                except OSError as error:
                    refused += 1
                    assert "File too large" in str(error), error
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            writer.write(Record(100, 0.0, {{"loss": 1.0}}))
            print(refused)
        """, tmp_path) as process:
        refused = int(process.stdout.read())
    assert process.returncode == 0 and refused > 50
    run = instrument.read(tmp_path)
    assert run["loss"].step.tolist() == [*range(1, 100 - refused), 100] and run.skipped == 0


def test_a_read_only_disk_is_named_and_can_be_read(disk):
    directory = disk("size=256k")
    with runs.create(directory / "run") as run, JsonlWriter(run) as writer:
        writer.write(record(1))
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    for path, resume in ((directory / "new", False), (directory / "new", True), (directory / "run", True)):
        with pytest.raises(OSError, match=f"{path.name}' cannot be written: Read-only file system. Give one on a disk"):
            runs.create(path, resume=resume)
    with pytest.raises(OSError, match="Read-only file system"), JsonlWriter(directory / "run") as writer:
        writer.write(record(2))
    assert instrument.read(directory / "run")["loss"].step.tolist() == [1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write in any directory")
def test_a_directory_without_the_right_to_write_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="run' cannot be written: Permission denied. Give one on a disk"):
        runs.create(tmp_path / "run")


# Clocks

def test_a_clock_that_goes_backwards_disorders_nothing(tmp_path, monkeypatch):
    day = [time.time()]
    monkeypatch.setattr(time, "time", lambda: day[0])
    with JsonlWriter(tmp_path, rotate_bytes=200, rotate_seconds=1000) as writer:
        for step in range(1, 20):
            writer.write(Record(step, day[0], {"loss": float(step)}))
            day[0] -= 3600 * step
    run = instrument.read(tmp_path)
    assert run["loss"].value.tolist() == list(range(1, 20)) and (run.times.value[1:] < run.times.value[:-1]).all()
