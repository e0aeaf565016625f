"""A job that resumes measures the same steps on all ranks, and they stop together, though their monitors are not alike."""
import pathlib

import pytest

import instrument
from instrument import _compat
from ranks import job

HERE = pathlib.Path(__file__).parent

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(
    _compat.RELEASE.release < (2, 7), reason="2.0.0 has no msrun, and refuses PyNative data parallel on a CPU")]


def test_a_resumed_job_goes_on_and_stops_as_one(tmp_path):
    told, printed = job(HERE / "resumed_rank.py", 2, tmp_path, "first")
    assert told == {"made": [[[1, 1, 3, 3]]] * 2, "errors": [[{}]] * 2}, printed
    told, printed = job(HERE / "resumed_rank.py", 2, tmp_path, "second")
    # The last one recorded is step 3, so that it goes on with 4. Step 9 is seen when the next measured one has been made.
    assert told == {"made": [[[4, 4, 6, 6, 6, 9, 9, 9, 12]]] * 2, "errors": [[{}]] * 2}, printed
    run = instrument.read(tmp_path / "run")
    assert run["grad/norm"].step.tolist() == [1, 3, 4, 6, 9, 12] and run.ranks[1]["step_time"].step.tolist() == [3, 6, 9, 12]
    # Made once what has been read is due, and with the number of the step that the weights have come to.
    assert [each["step"] for each in run.texts] == [3, 6, 9, 12, 12]
    assert run["val/accuracy"].step.tolist() == [7, 11]  # that of step 4 was made again
