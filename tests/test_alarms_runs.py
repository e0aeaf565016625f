"""The alarms that are on by default: silent over healthy training, and quick where it fails."""
import math
from dataclasses import replace

import pytest

from healthy_runs import KINDS, healthy_run
from instrument.alarms import AlarmSet, Overfitting, SlowRank, UpdateRatio, default_alarms
from instrument.record import Record


def observe(records, alarms=None):
    """(step, incident) of each change, the ends at the end included."""
    alarms, changes = AlarmSet(alarms or default_alarms()), []
    for record in records:
        changes += [(record.step, incident) for incident in alarms.observe(record)]
        assert alarms.errors == ()
    return changes + [(record.step, incident) for incident in alarms.finish()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed, every", [(0, 1), (1, 1), (2, 10)])
def test_healthy_runs_are_silent(kind, seed, every):
    records = healthy_run(kind, seed, steps=1000, every=every, loss_scale=seed % 2 == 0)
    assert observe(records, [*default_alarms(), UpdateRatio()]) == []


START = 601


def failing(change, kind="language model", steps=900):
    """A healthy run whose training records from `START` on are changed: change(values, records since)."""
    for record in healthy_run(kind, 7, steps=steps):
        if record.step >= START and "loss" in record.values:
            record = replace(record, values={**record.values, **change(record.values, record.step - START)})
        yield record


def scaled(prefix, factor, count=10 ** 9):
    return lambda values, since: {name: value * factor for name, value in values.items()
                                  if name.startswith(prefix) and since < count}


def diverging(values, since):
    return {"loss": values["loss"] * 1.02 ** since, "grad/norm": values["grad/norm"] * 1.1 ** since}


OVERFLOW = {"overflow": 1.0, "skipped": 1.0, "grad/norm": math.inf, "grad/nonfinite": 4.0}
NAN = {"loss": math.nan, "grad/norm": math.nan, "grad/nonfinite": 4.0, "activation/nonfinite/blocks.1.relu": 1.0,
       "activation/rms/blocks.1.relu": math.nan, "activation/nonfinite/head": 1.0}


@pytest.mark.parametrize("alarm, within, where, last, change", [
    ("NonFinite", 0, "blocks.1.relu", "open", lambda values, since: NAN),
    ("NonFinite", 9, None, "open", lambda values, since: OVERFLOW),
    ("LossSpike", 0, "", "end", scaled("loss", 2, 1)),
    ("LossSpike", 15, "", "open", diverging),
    ("GradientSpike", 0, None, "end", scaled("grad/norm", 20, 1)),
    ("GradientSpike", 25, None, "open", diverging),
    ("VanishingGradient", 20, "", "open", scaled("grad/norm", 1e-13)),
    ("VanishingGradient", 20, "blocks.1.bias", "open", scaled("grad/norm/blocks.1.bias", 0)),
    ("DeadLayer", 20, "blocks.0.relu", "open", lambda values, since: {"activation/zero_fraction/blocks.0.relu": 1.0}),
    ("HalfSaturation", 0, "head", "open", lambda values, since: {"activation/absmax/head": 65504.0}),
    ("LearningRate", 0, "", "end", scaled("learning_rate", 50)),
    ("ThroughputDrop", 25, "", "end", scaled("step_time", 4)),
    ("DataStarved", 50, "", "open", lambda values, since: {"data_wait_fraction": 0.8}),
])
def test_each_finds_its_failure_soon(alarm, within, where, last, change):
    changes = observe(failing(change))
    (step, incident), *_ = [each for each in changes if each[1].alarm == alarm and each[1].state == "begin"]
    assert START <= step <= START + within
    assert where is None or incident.where == where
    others = {each.alarm for _, each in changes} - {alarm}
    assert others <= ({"LossSpike", "GradientSpike", "LearningRate"} if change is diverging else set())  # nothing else is said
    assert [each.state for _, each in changes if each.alarm == alarm] == ["begin", last]


def test_what_follows_from_a_nan_is_not_told_again():
    """ReLU makes 0 of NaN, and its gradient 0: layers look dead, and gradients vanished."""
    follows = {"grad/norm": 0.0, "grad/norm/blocks.1.bias": 0.0, "activation/zero_fraction/blocks.0.relu": 1.0}
    for lost in ({"loss": math.nan}, {"weight/norm": math.nan}, {"grad/nonfinite": 3.0}):
        changes = observe(failing(lambda values, since, lost=lost: {**follows, **lost}))
        assert {each.alarm for _, each in changes} == {"NonFinite"}


def test_overfitting_is_found_after_three_rises():
    validations = iter([2.0, 1.8, 1.7, 1.75, 1.8, 1.9, 2.0])
    records = [record if "loss" in record.values else replace(record, values={"val/loss": next(validations)})
               for record in healthy_run("language model", 1, steps=1400)]
    changes = observe(records)
    assert [(step, each.alarm, each.state, each.steps) for step, each in changes] == [
        (1200, "Overfitting", "begin", 1), (1400, "Overfitting", "open", 2)]
    assert observe(records, [Overfitting(validations=5)]) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_any_metric_may_be_anything(bad):
    """One metric after the other, then all at once, and back to health: no alarm fails."""
    records = list(healthy_run("language model", 3, steps=60, validate_every=20))
    names = list(records[5].values)
    for position in range(0, 60, 20):  # while there is nothing to compare with yet, and later
        alarms = AlarmSet([*default_alarms(), UpdateRatio()])
        for i, record in enumerate(records):
            if position <= i < position + len(names):
                record = replace(record, values={**record.values, names[i - position]: bad})
            alarms.observe(record)
            assert alarms.errors == ()
    alarms = AlarmSet([*default_alarms(), UpdateRatio()])
    begun = []
    for i, record in enumerate(records * 3):
        if 70 <= i < 100:
            record = replace(record, values=dict.fromkeys(record.values, bad))
        begun += [each.alarm for each in alarms.observe(record) if each.state == "begin"]
        assert alarms.errors == ()
    assert begun.count("NonFinite") <= 2 and "NonFinite" in begun  # one of training, one of validation


def test_any_metric_may_be_missing():
    records = list(healthy_run("language model", 4, steps=50, validate_every=10, loss_scale=False))
    for name in records[5].values:
        without = [replace(record, values={key: value for key, value in record.values.items() if key != name})
                   for record in records]
        assert observe(without) == []
    assert observe([Record(1, 0.0, {}), Record(1, 0.0, {}), Record(0, 0.0, {"x": 1.0})]) == []
    alone = [[Record(record.step, 0.0, {name: record.values[name]}) for record in records if name in record.values]
             for name in records[5].values]
    for each in alone:
        assert observe(each) == []


def test_the_first_record_of_all_may_be_bad():
    ((_, begin), (_, still)) = observe([Record(1, 0.0, {"loss": math.nan, "learning_rate": 1e-3, "step_time": 1.0})])
    assert (begin.alarm, begin.state, still.state, still.steps) == ("NonFinite", "begin", "open", 1)


def test_the_defaults_only_log():
    alarms = default_alarms(first_nonfinite=print)
    assert all(alarm.policy == "log" for alarm in alarms) and alarms[0].first_nonfinite is print
    assert [alarm.name for alarm in alarms] == [
        "NonFinite", "GradientSpike", "LossSpike", "VanishingGradient", "DeadLayer", "HalfSaturation", "LearningRate",
        "ThroughputDrop", "DataStarved", "SlowRank", "Overfitting"]
    assert default_alarms()[0] is not default_alarms()[0]
    # One process has no ranks to compare; who asks for it by name is told.
    assert all(alarm.sees(["loss", "learning_rate"]) for alarm in default_alarms() if alarm.name == "SlowRank")
    assert not SlowRank().sees(["loss", "data_wait"]) and "ranks=True" in SlowRank().unmet
