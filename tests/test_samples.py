"""TextSampler: when, what, and its arguments."""
import pytest

from instrument.samples import TextSampler


def test_each_prompt_gets_a_text():
    assert TextSampler(str.upper, ["a", "b"], 10).sample() == {"sample/0": "A", "sample/1": "B"}


@pytest.mark.parametrize("steps, due", [
    (range(1, 32), [10, 20, 30]), ([3, 6, 9, 12, 15, 18, 21], [12, 21]), ([25, 30, 41], [30, 41]), ([10, 11, 20], [10, 20])])
def test_it_is_due_every_so_many_steps(steps, due):
    sampler = TextSampler(str, ["a"], 10)
    assert [step for step in steps if sampler.is_due(step)] == due


def test_a_run_that_goes_back_is_sampled_again():
    sampler = TextSampler(str, ["a"], 10)
    assert [sampler.is_due(step) for step in (100, 5, 10)] == [True, False, True]


@pytest.mark.parametrize("arguments, error, message", [
    ((None, ["a"], 1), TypeError, "generate must be a function"), ((str, "a", 1), TypeError, r"Use \['a'\]"),
    ((str, [1], 1), TypeError, "holds 1"), ((str, [], 1), ValueError, "at least one text"),
    ((str, ["a"], 0), ValueError, "positive number of steps"), ((str, ["a"], True), ValueError, "positive number of steps")])
def test_arguments_that_cannot_work_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        TextSampler(*arguments)
