"""A rank that dies takes no records of others with it, and one that waits for it for ever ends by SIGTERM."""
import os
import pathlib
import time

import pytest
from dying_rank import LAST

import instrument
from instrument import _compat, runs
from ranks import job

HERE = pathlib.Path(__file__).parent

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(
    _compat.RELEASE.release < (2, 7), reason="2.0.0 has no msrun, and refuses PyNative data parallel on a CPU")]


@pytest.fixture(autouse=True)
def msrun_notices_soon(monkeypatch):
    monkeypatch.setenv("MS_NODE_TIMEOUT", "5")  # seconds, in place of 30


def test_a_killed_rank_leaves_the_others_records(tmp_path):
    began = time.monotonic()
    told, printed = job(HERE / "dying_rank.py", 2, tmp_path, "killed")
    assert told == {} and time.monotonic() - began < 150, printed
    run = instrument.read(tmp_path / "run")
    # The last step was not read yet: it is when the next one has begun.
    assert run["loss"].step.tolist() == run["rank/argmax/loss"].step.tolist() == list(range(1, LAST))
    assert run.skipped == 0 and runs.read_summary(tmp_path / "run") == {}


def test_a_rank_that_waits_for_ever_ends_by_the_signal(tmp_path):
    told, printed = job(HERE / "dying_rank.py", 2, tmp_path, "stuck")
    [seconds] = told["seconds"][1]
    assert list(told) == ["seconds"] and seconds < 20, printed
    run = instrument.read(tmp_path / "run")
    assert run["loss"].step.tolist() == list(range(1, LAST + 1))
    summary = runs.read_summary(tmp_path / "run")
    assert summary["status"] == "terminated: SIGTERM" and summary["last_step"] == LAST and summary["errors"] == {}
    assert not os.path.exists(f"/proc/{(tmp_path / 'pid_of_rank_0').read_text()}")
