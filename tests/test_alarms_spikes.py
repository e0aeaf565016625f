"""Spikes and what they are compared with, against twins that keep lists and sort them."""
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.alarms import NOT_JUDGED, Finding, GradientSpike, LossSpike
from instrument.alarms.baseline import Baseline
from instrument.record import Record

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
NORMS = st.one_of(st.floats(0.0, 3e38), st.floats(0.5, 2.0), st.sampled_from([1.0, 3.0, 1e30]))


@given(st.lists(FINITE, min_size=1, max_size=60), st.integers(1, 20))
def test_median_and_deviations_are_those_of_numpy(values, window):
    baseline = Baseline(window)
    for i, value in enumerate(values, 1):
        baseline.add(value)
        kept = np.array(values[max(i - window, 0):i], np.float64)
        assert len(baseline) == len(kept)
        assert baseline.median() == np.median(kept)
        assert baseline.deviation() == pytest.approx(1.4826 * np.median(np.abs(kept - np.median(kept))), rel=1e-12)
        ninth = np.sort(kept)[math.ceil(Fraction(9, 10) * len(kept)) - 1]
        assert baseline.upper_deviation() == pytest.approx((ninth - np.median(kept)) / 1.2816, rel=1e-12)
        assert baseline.known_height() == -math.inf  # none was late


def test_a_normal_sample_has_its_standard_deviation():
    baseline = Baseline(20_000)
    for value in np.random.default_rng(0).normal(3, 2, 20_000):
        baseline.add(float(value))
    # The standard errors are about 0.018 for the median, and 0.8 % and 1.2 % for the deviations; four of them are allowed.
    assert baseline.median() == pytest.approx(3, abs=0.07)
    assert baseline.deviation() == pytest.approx(2, rel=0.04) and baseline.upper_deviation() == pytest.approx(2, rel=0.05)


def test_what_stood_out_is_known_for_one_window_from_half_a_window_later_on():
    baseline = Baseline(10)
    for _ in range(10):
        baseline.add(1.0)
    baseline.add_outlier(9.0)
    known = []
    for _ in range(20):
        baseline.advance()
        known.append(baseline.known_height(1))
    assert known == [-math.inf] * 4 + [9.0] * 10 + [-math.inf] * 6
    assert len(baseline) == 10 and baseline.median() == 1 and baseline.deviation() == baseline.upper_deviation() == 0


@pytest.mark.parametrize("every, adopted", [(1, True), (2, False), (3, False)])
def test_more_than_half_of_a_window_is_the_new_level(every, adopted):
    baseline, seen = Baseline(10), []
    for i in range(40):
        baseline.advance()
        (baseline.add if i < 10 or i % every else baseline.add_outlier)(1.0 if i < 10 or i % every else 9.0)
        seen.append(baseline.median())
    assert seen == [1.0] * 15 + [9.0] * 25 if adopted else seen == [1.0] * 40


class Twin:
    """The rule of the docstring, with lists."""

    def __init__(self, deviations, floor, window, warm_up):
        self.deviations, self.floor, self.window, self.warm_up = deviations, math.log1p(floor), window, warm_up
        self.good, self.outliers, self.high, self.now, self.level = [], [], [], 0, None

    def is_spike(self, value, left_out):
        x = math.log(value) if value > 0 else math.log(1e-30)
        self.now += 1
        good = np.array(self.good[-self.window:])
        if len(good) < self.warm_up:
            self.good += [] if left_out else [x]
            return False
        median = np.median(good)
        if self.level is None:
            self.level = math.exp(median)
        s = max(1.4826 * np.median(np.abs(good - median)),
                (np.sort(good)[math.ceil(Fraction(9, 10) * len(good)) - 1] - median) / 1.2816)
        half_window = self.window // 2
        known = sorted(old for when, old in self.outliers if half_window <= self.now - when < half_window + self.window)[-3:]
        is_known = len(known) == 3 and x <= known[0] + self.floor
        allowed = x > median + self.floor and value - math.exp(median) > 1e-3 * self.level
        half = bool(allowed and x - median > self.deviations * s / 2)
        full = bool(allowed and x - median > self.deviations * s)
        self.high.append(half and not is_known)
        if half and not left_out:
            self.outliers.append((self.now, x))
            recent = [old for when, old in self.outliers if self.now - when < self.window]
            if len(recent) > self.window / 2 and x <= max(recent[:len(recent) // 2]):
                self.good, self.outliers = recent, []
        elif not left_out:
            self.good.append(x)
        return not is_known and (full or half and sum(self.high[-5:]) >= 3)


@settings(max_examples=200)
@given(st.lists(st.tuples(NORMS, st.booleans()), max_size=80), st.integers(5, 20), st.sampled_from([0.1, 1.0]),
       st.sampled_from([0.5, 6.0]))
def test_spikes_are_those_of_the_twin(steps, window, floor, deviations):
    alarm = GradientSpike(window=window, warm_up=4, floor=floor, deviations=deviations)
    twin = Twin(deviations, floor, window, 4)
    for i, (value, left_out) in enumerate(steps, 1):
        verdict = alarm.check(Record(i, 0.0, {"grad/norm": value, "skipped": float(left_out)}))
        assert isinstance(verdict, Finding) == twin.is_spike(value, left_out)


def noisy(count, level=2.0, sigma=0.05, seed=0):
    return list(level * np.exp(sigma * np.random.default_rng(seed).normal(size=count)))


def findings(alarm, values, **more):
    """The positions of the findings, from 0."""
    rows = [{alarm.metric: value, **{key: row[i] for key, row in more.items()}} for i, value in enumerate(values)]
    return [i for i, row in enumerate(rows) if isinstance(alarm.check(Record(i + 1, 0.0, row)), Finding)]


@pytest.mark.parametrize("make", [LossSpike, GradientSpike])
def test_a_spike_is_found_at_once_and_over_at_once(make):
    values = noisy(200)
    values[150] *= 5
    assert findings(make(), values) == [150]


def test_it_is_silent_until_it_knows_enough():
    values = noisy(60)
    values[29] *= 50
    assert findings(LossSpike(), values) == []
    values = noisy(60)
    values[30] *= 50  # it knows 30
    assert findings(LossSpike(), values) == [30]


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, 3e38, -2.0, 0.1])
def test_constants_and_rounding_are_no_spikes(value):
    rounded = [value * (1 + 1e-6 * (i % 7)) for i in range(300)]
    for alarm in (LossSpike(), GradientSpike(), LossSpike(floor=1e-5)):
        assert findings(alarm, [value] * 300) == [] and findings(alarm, rounded) == []


def test_of_a_constant_anything_above_the_floor_is_a_spike():
    assert findings(LossSpike(), [1.0] * 50 + [1.09, 1.0, 1.11]) == [52]
    assert findings(LossSpike(), [-1.0] * 50 + [-0.91, -1.0, -0.89]) == [52]


def test_a_fall_is_no_spike():
    assert findings(LossSpike(), noisy(100) + [0.01, 1e-9, 0.0] + noisy(20, level=0.5)) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_to_another_alarm_and_never_enters(bad):
    clean, dirty = LossSpike(), LossSpike()
    values = noisy(200)
    values[180] = 20.0
    assert findings(clean, values) == [180]
    for i, value in enumerate(values):
        if i % 3 == 0:
            assert dirty.check(Record(i, 0.0, {"loss": bad})) is NOT_JUDGED
        verdict = dirty.check(Record(i, 0.0, {"loss": value}))
        assert isinstance(verdict, Finding) == (i == 180)
        if verdict:
            message = verdict.message
    assert message.startswith("loss is 20, ") and "the median of the last 100 good records" in message
    median = np.median(values[80:180])
    assert f"above {median:.4g}" in message


@pytest.mark.parametrize("flag", ["skipped", "overflow"])
def test_steps_without_an_update_never_enter(flag):
    values = noisy(200)
    left_out = [0.0] * 200
    for i in range(40, 190, 2):  # a second level, at every other step; without the flag it would become the usual one
        values[i], left_out[i] = 30.0, 1.0
    alarm = GradientSpike()
    assert findings(alarm, values, **{flag: left_out}) == list(range(40, 190, 2))


def test_a_missing_metric_is_not_judged():
    assert LossSpike().check(Record(1, 0.0, {"val/loss": 1.0})) is NOT_JUDGED
    assert LossSpike(metric="loss/aux").check(Record(1, 0.0, {"loss": 1.0})) is NOT_JUDGED


def test_a_lasting_new_level_becomes_the_usual_one():
    values = noisy(200) + noisy(300, level=8.0, seed=1)
    found = findings(LossSpike(), values)
    assert found == list(range(200, found[-1] + 1)) and 250 <= found[-1] < 270
    values[480] *= 4
    assert findings(LossSpike(), values)[-1] == 480


def test_after_one_incident_the_next_is_found_as_soon():
    values = noisy(400, level=0.01, sigma=0.5)
    values[200:240] = [0.69] * 40
    values[300] = 50.0
    found = findings(LossSpike(), values)
    assert found[0] == 200 and found[-1] == 300 and not set(found) & set(range(240, 300))


def test_what_comes_again_and_again_stops_to_be_a_spike():
    values = noisy(1000)
    values[200::10] = [9.0 + 0.01 * i for i in range(80)]
    found = findings(LossSpike(), values)
    assert found[0] == 200 and found[-1] < 300


@pytest.mark.parametrize("growth, within", [(1.05, 40), (1.1, 20), (1.5, 6)])
def test_growth_without_a_leap_is_found(growth, within):
    values = noisy(200, sigma=0.2) + [2.0 * growth ** i for i in range(100)]
    found = findings(GradientSpike(), values)
    assert 200 <= found[0] < 200 + within and found[-1] == 299 and len(found) > 100 - within - 10


def test_less_than_a_spike_is_one_if_it_stays():
    values = noisy(200, sigma=0.1)
    values[150:153] = [2.0 * math.exp(0.45)] * 3  # 4.5 deviations
    assert findings(LossSpike(), values) == [152]
    values[151] = 2.0
    assert findings(LossSpike(), values) == []


def test_a_loss_that_becomes_negative_is_compared_as_it_is():
    random = np.random.default_rng(3)
    values = list(np.linspace(2, -3, 400) + 0.05 * random.normal(size=400))
    values[390] += 5  # the fall of the last hundred is 1.25 of its own
    assert findings(LossSpike(), values) == [390]


def test_the_parameter_with_the_largest_part_is_named():
    alarm = GradientSpike()
    for i in range(50):
        alarm.check(Record(i, 0.0, {"grad/norm": 1.0, "grad/norm/a": 0.6, "grad/norm/b": 0.8}))
    found = alarm.check(Record(51, 0.0, {"grad/norm": 50.0, "grad/norm/a": 40.0, "grad/norm/b": 30.0}))
    assert (found.metric, found.value, found.where) == ("grad/norm", 50.0, "a")
    assert "64% of its square is of a" in found.message
    unnamed = alarm.check(Record(52, 0.0, {"grad/norm": 50.0, "grad/norm/a": math.nan}))
    assert unnamed.where == ""


@pytest.mark.parametrize("options, message", [
    ({"deviations": 0}, "`deviations` must be a number above 0"), ({"deviations": "6"}, "`deviations`"),
    ({"floor": -1}, "`floor`"),
    ({"deviations": math.nan}, "`deviations`"), ({"floor": math.inf}, "`floor`"), ({"window": 4}, "`window` must be"),
    ({"warm_up": 1}, "`warm_up`"), ({"window": 20, "warm_up": 21}, "`warm_up` must be at most `window`"),
    ({"window": 9.5}, "`window`")])
def test_refused(options, message):
    for make in (LossSpike, GradientSpike):
        with pytest.raises(ValueError, match=message):
            make(**options)
