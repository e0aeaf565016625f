"""What `instrument doctor` runs: it passes here, and a step that lies does not."""
import inspect
import itertools
import math
import re
from dataclasses import fields

import numpy as np
import pytest

from instrument import InstrumentedStep, doctor, doctor_report, trials
from instrument.step_options import StepOptions

pytestmark = pytest.mark.compiles


def test_all_options_are_right_here():
    said = list(doctor.trials())
    for mode in ("graph", "pynative"):
        results = {each["option"]: each for each in said if each["mode"] == mode and "option" in each}
        assert set(results) == {*trials.OPTIONS, "attention", "TrainingMonitor", "NormStats"}
        # float32 against float64: some roundings of 6e-8 each.
        assert {name: each for name, each in results.items() if not each.get("error", math.inf) < 2e-5} == {}
    assert [each for each in said if "failed" in each] == []


def test_a_wrong_number_is_found(monkeypatch, mode):
    true = trials.Twin.step

    def step(self, *arguments):
        values = true(self, *arguments)
        return {**values, "grad/norm": values["grad/norm"] * 1.01}

    monkeypatch.setattr(trials.Twin, "step", step)
    assert trials.try_step({"activations": None}) == pytest.approx(0.01 / 1.01, rel=1e-3)


def test_the_twin_has_the_gradient_of_its_loss():
    task = trials.Task()
    before = [weight.copy() for weight in task.twin.weights]
    task.twin.step()
    gradients = [moment.copy() for moment in task.twin.moments]  # the first moment of the first step
    for weight, gradient in zip(range(4), gradients):
        moved = trials.Twin(before, task.twin.x, task.twin.target)
        index = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        losses = []
        for sign in (1, -1):
            moved.weights = [array.copy() for array in before]
            moved.weights[weight][index] += sign * 1e-5
            moved.step()
            losses.append(moved.loss)
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradient[index], rel=1e-5)


def test_a_trial_that_raises_is_an_answer(monkeypatch):
    monkeypatch.setattr(trials, "OPTIONS", {**trials.OPTIONS, "norms": {"activations": ["no such cell"]}})
    first = next(trials.run())
    assert first["option"] == "norms" and first["failed"].startswith("ValueError:") and "\n" not in first["failed"]


def test_an_option_that_fails_among_others_is_named(monkeypatch):
    monkeypatch.setattr(trials, "TOGETHER", (("updates", "window"),))
    monkeypatch.setattr(trials, "OPTIONS", {"updates": {"updates": True}, "window": {"window": -1}})
    alone, bad, joint = itertools.islice(trials.run(), 3)
    assert alone["option"] == "updates" and alone["error"] < 2e-5
    assert bad["option"] == "window" and joint["option"] == "updates, window"
    assert bad["failed"] == joint["failed"] and bad["failed"].startswith("ValueError: `window`")


def test_every_option_is_tried_or_told_of():
    options = set(list(inspect.signature(InstrumentedStep).parameters)[2:])
    assert options == {*trials.OPTIONS, "attention", *trials.NOT_TRIED} - {"norms"}
    assert [name for names in trials.TOGETHER for name in names] == list(trials.OPTIONS)
    assert all(re.search(rf"\b{name}\b", doctor_report.NOT_TRIED) for name in trials.NOT_TRIED)
    assert {field.name for field in fields(StepOptions)} <= options


def test_too_few_numbers_are_no_comparison():
    with pytest.raises(AssertionError, match="too few"):
        trials.error_of({"grad/norm": 1.0}, {"grad/norm": 1.0})
