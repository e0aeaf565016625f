"""A rank that dies, starts late, has no rank 0 or a full disk keeps no other one waiting; jobs share no directory."""
import os
import pathlib
import subprocess
import sys
import time

import pytest
from test_run_files import disk  # noqa: F401  (a fixture)

import instrument

HERE = pathlib.Path(__file__).parent
STEPS = 300  # a second
QUICK = 1.0  # seconds a hook may take on a busy machine; what it must not do is wait for others, which takes longer


class Rank:
    """A process that is one rank of a job; `go` begins its steps, and ends its stay."""

    def __init__(self, directory, rank, *, job="a", ranks=2, steps=20, stay=False):
        environment = {**os.environ, "MS_JOB_ID": job, "PYTHONPATH": str(HERE.parents[1]), "GLOG_v": "4"}
        command = [sys.executable, str(HERE / "rank.py"), *map(str, (directory, rank, ranks, steps)), *["stay"] * stay]
        self.process = subprocess.Popen(command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE)

    def go(self):
        self.wait_for("ready")
        print(file=self.process.stdin, flush=True)

    def wait_for(self, line):
        said = self.process.stdout.readline()
        while said and said != f"{line}\n":
            said = self.process.stdout.readline()
        assert said, self.process.stderr.read()

    def result(self):
        """(seconds of the longest hook, seconds of the end of training, errors, run directory)"""
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0 and "done " in out, out + err
        longest, end, errors, directory = out.split("done ")[1].split()
        return float(longest), float(end), int(errors), pathlib.Path(directory) if directory != "None" else None


@pytest.fixture
def start():
    started = []

    def rank(*args, **kwargs):
        started.append(Rank(*args, **kwargs))
        return started[-1]

    yield rank
    for each in started:
        each.process.kill()
        each.process.communicate()


def test_ranks_go_on_without_one_that_dies_or_comes_late_and_jobs_share_no_directory(start, tmp_path):
    ranks = {(job, rank): start(tmp_path / "run", rank, job=job, ranks=3, stay=rank == 0, steps=STEPS)
             for job in ("a", "b") for rank in (0, 1)}  # of which rank 1 of job a goes on for a second
    late = start(tmp_path / "run", 2, job="b", ranks=3)
    # Job a: rank 0 is killed while rank 1 writes.
    ranks["a", 0].go()
    ranks["a", 0].wait_for("steps")
    ranks["a", 1].go()
    deadline = time.monotonic() + 20
    while not (tmp_path / "run" / "rank_1" / "metrics-00000.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks["a", 0].process.kill()
    assert not (tmp_path / "run-2").exists()  # job b comes to the same name
    ranks["b", 0].go()
    ranks["b", 0].wait_for("steps")
    ranks["b", 1].go()
    results = {key: ranks[key].result() for key in (("a", 1), ("b", 1), ("b", 0))}
    late.go()  # when rank 0 has ended already, and holds no directory any more
    results["b", 2] = late.result()
    assert all(longest < QUICK for longest, *_ in results.values())
    assert {key: result[3] for key, result in results.items() if key != ("b", 2)} == {
        ("a", 1): tmp_path / "run" / "rank_1", ("b", 0): tmp_path / "run-2", ("b", 1): tmp_path / "run-2" / "rank_1"}
    for directory, rank in (("run", 1), ("run-2", 1)):
        assert instrument.read(tmp_path / directory).ranks[rank]["loss"].step.tolist() == list(range(1, STEPS + 1))
    assert instrument.read(tmp_path / "run-2")["loss"].step.tolist() == list(range(1, STEPS + 1))
    assert results["b", 2][1] < 10 and results["b", 2][2] > 0  # it gave up, and said so


def test_a_rank_without_rank_0_trains_on_and_ends(start, tmp_path):
    alone = start(tmp_path / "run", 1)
    alone.go()
    longest, end, errors, directory = alone.result()
    assert longest < QUICK and end < 10  # after `writer_timeout`, 2 seconds
    assert errors and directory is None and not (tmp_path / "run").exists()


def test_a_full_disk_of_one_rank_is_its_own_trouble(start, disk, tmp_path):  # noqa: F811
    small = disk("size=64k")
    run = tmp_path / "run"
    ranks = [start(run, 0, steps=200), start(run, 1, steps=200)]
    ranks[0].process.stdout.readline()  # ready
    run.mkdir()
    (run / "rank_1").symlink_to(small)
    (small / "full").write_bytes(b"x" * (60 << 10))
    print(file=ranks[0].process.stdin, flush=True)
    ranks[1].go()
    results = [rank.result() for rank in ranks]
    assert all(longest < QUICK and end < 20 for longest, end, *_ in results)
    assert results[0][2] == 0 and results[1][2] > 0
    assert instrument.read(run)["loss"].step.tolist() == list(range(1, 201))
