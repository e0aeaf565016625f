"""Each alarm but the spikes: what it finds, what it lets pass, and what it names."""
import math

import numpy as np
import pytest

from healthy_runs import step_decay, warm_up_and_cosine
from instrument.alarms import (
    NOT_JUDGED,
    AlarmSet,
    DataStarved,
    DeadLayer,
    Finding,
    HalfSaturation,
    LearningRate,
    NonFinite,
    Overfitting,
    SlowRank,
    ThroughputDrop,
    UpdateRatio,
    VanishingGradient,
)
from instrument.nonfinite import FirstNonfinite
from instrument.record import Record

NAN, INF = math.nan, math.inf
GOOD = {"loss": 1.0, "loss/aux": 0.5, "grad/norm": 1.0, "weight/norm": 3.0, "grad/nonfinite": 0.0, "grad/norm/a": 0.6,
        "grad/norm/b": 0.8, "weight/norm/a": 2.0, "weight/norm/b": 2.0, "activation/count/relu": 1.0,
        "activation/nonfinite/relu": 0.0, "activation/rms/relu": 1.0, "activation/absmax/relu": 4.0, "learning_rate": 1e-3,
        "activation_grad/nonfinite/relu": 0.0, "activation_grad/absmax/relu": 0.1}


def run(alarm, rows):
    """(step of the record, incident) of each change; rows are values, or (step, values)."""
    alarms, changes = AlarmSet([alarm]), []
    for i, row in enumerate(rows, 1):
        step, values = row if isinstance(row, tuple) else (i, row)
        changes += [(step, incident) for incident in alarms.observe(Record(step, 0.0, values))]
        assert alarms.errors == ()
    return changes


def begins(alarm, rows):
    """(step, what is named) of each incident."""
    return [(step, incident.where) for step, incident in run(alarm, rows) if incident.state == "begin"]


# NonFinite

@pytest.mark.parametrize("metric, value, where", [
    ("loss", NAN, "loss"), ("loss", INF, "loss"), ("loss/aux", NAN, "aux"), ("grad/nonfinite", 2.0, ""),
    ("weight/norm", INF, "weight"),
    ("activation/nonfinite/relu", 1.0, "relu"), ("activation_grad/nonfinite/relu", 1.0, "relu")])
def test_each_kind_of_nan_is_found_and_named(metric, value, where):
    ((step, incident),) = run(NonFinite(), [GOOD, {**GOOD, metric: value}])
    assert (step, incident.metric, incident.where) == (2, metric, where)
    assert incident.value == value or math.isnan(value)
    assert incident.message.startswith(f"{metric} is {value:g}")


@pytest.mark.parametrize("kind", ["activation", "activation_grad"])
@pytest.mark.parametrize("stat, value", [("mean", NAN), ("absmax", INF), ("rms", NAN)])
def test_without_the_flag_other_statistics_tell(kind, stat, value):
    ((_, incident),) = run(NonFinite(), [{f"{kind}/{stat}/relu": value, f"{kind}/{stat}/other": 1.0}])
    assert incident.metric == f"{kind}/{stat}/relu" and incident.where == "relu"
    assert run(NonFinite(), [{f"{kind}/rms/relu": NAN, f"{kind}/mean/relu": 1e-20}]) == []  # squares too small for a float32
    assert run(NonFinite(), [{f"{kind}/{stat}/relu": value, f"{kind}/nonfinite/relu": 0.0}]) == []


def test_the_first_bad_one_and_its_clean_neighbour():
    bad = {**GOOD, "loss": NAN, "grad/norm": NAN, "grad/nonfinite": 2.0, "grad/norm/a": NAN, "grad/norm/b": NAN,
           "activation/rms/late": NAN, "activation/nonfinite/late": 1.0}
    ((_, incident),) = run(NonFinite(), [bad])
    assert incident.message == ("loss is nan. First not finite: activation late (after activation relu, which was finite; "
                                "what lies between them was not measured)")
    assert incident.where == "late"


def test_a_gradient_alone_by_the_order_of_the_names():
    bad = {**GOOD, "grad/norm": INF, "grad/nonfinite": 1.0, "grad/norm/a": INF}
    ((_, incident),) = run(NonFinite(), [bad])
    assert incident.message == "grad/nonfinite is 1. First not finite: grad a (after grad b, which was finite)"


def test_the_step_tells_where_once_an_incident():
    asked = []

    def locate(values):
        asked.append(values)
        return FirstNonfinite("activation", "blocks.3", "activation", "blocks.2")

    alarm = NonFinite()
    alarm.locate = locate
    changes = run(alarm, [GOOD, *[{**GOOD, "loss": NAN}] * 5, *[GOOD] * 5])
    assert len(asked) == 1
    assert [(step, each.where, each.steps) for step, each in changes] == [(2, "blocks.3", 1), (11, "blocks.3", 5)]
    other = NonFinite(first_nonfinite=lambda values: FirstNonfinite("loss", ""))
    other.locate = locate
    ((_, incident),) = run(other, [{**GOOD, "loss": NAN, "loss/aux": INF}])
    assert incident.where == "aux" and incident.message.endswith("; of the losses: aux") and len(asked) == 1


def test_a_step_that_cannot_tell_where_does_not_silence_it():
    def fails(values):
        raise KeyError("no such cell")

    ((_, incident),) = run(NonFinite(first_nonfinite=fails), [{"loss": NAN, "weight/norm": 1.0}])
    assert incident.message == ("loss is nan. First not finite: loss (after the weights, which were all finite) "
                                "(the step could not tell where: KeyError: 'no such cell')")


def test_what_is_nan_for_a_reason_is_none():
    fine = {**GOOD, "grad/norm/a": NAN, "moment1/cosine": NAN, "spike/score": NAN, "update/ratio/b": INF,
            "attention/entropy/x": NAN}
    assert run(NonFinite(), [fine] * 3) == []
    assert run(NonFinite(), [{**GOOD, "grad/norm": NAN}] * 3) == []  # all squares are too small, nothing is counted
    assert len(run(NonFinite(), [{"grad/norm": NAN}])) == 1  # it is not known why


OVERFLOW = {**GOOD, "overflow": 1.0, "skipped": 1.0, "loss_scale": 2.0, "grad/norm": INF, "grad/nonfinite": 2.0, "loss": INF}
SCALED = {**GOOD, "overflow": 0.0, "skipped": 0.0, "loss_scale": 2.0}


def test_overflows_of_loss_scaling_are_no_alarm_and_many_in_a_row_are():
    assert run(NonFinite(), [SCALED, *[OVERFLOW] * 9, SCALED, *[OVERFLOW] * 9, SCALED]) == []
    changes = run(NonFinite(), [SCALED, *[OVERFLOW] * 12, *[SCALED] * 5])
    assert [(step, each.state, each.first_step, each.last_step, each.steps) for step, each in changes] == [
        (11, "begin", 11, 11, 1), (18, "end", 11, 13, 3)]
    assert changes[0][1].message.startswith("10 overflows in a row, at a loss scale of 2 now. First not finite: loss")
    assert begins(NonFinite(overflows=3), [SCALED, *[OVERFLOW] * 4])[0][0] == 4


def test_a_dynamic_scale_may_look_for_its_size_at_first():
    assert run(NonFinite(), [*[OVERFLOW] * 23, SCALED]) == []
    assert begins(NonFinite(), [OVERFLOW] * 30)[0][0] == 24


def test_records_of_validation_do_not_come_between_overflows():
    assert begins(NonFinite(), [SCALED, *[OVERFLOW, {"val/loss": 1.0}] * 12])[0][0] == 20


def test_an_overflow_with_a_bad_weight_is_an_alarm_at_once():
    changes = run(NonFinite(), [SCALED, {**OVERFLOW, "weight/norm": NAN, "weight/norm/b": NAN}])
    assert [(step, each.metric, each.where) for step, each in changes] == [(2, "weight/norm", "b")]


def test_an_overflow_that_was_not_left_out_is_an_alarm():
    assert begins(NonFinite(), [SCALED, {**OVERFLOW, "skipped": 0.0}])[0][0] == 2


def test_a_spike_that_was_left_out_may_still_be_nan():
    assert begins(NonFinite(), [{**GOOD, "loss": NAN, "skipped": 1.0}]) == [(1, "loss")]


def test_validation_has_incidents_of_its_own():
    bad = {"val/loss": NAN, "val/accuracy": 0.5}
    changes = run(NonFinite(quiet=2), [GOOD, bad, *[GOOD] * 9, bad, {"val/loss": 1.0}, GOOD, {"val/loss": 1.0}])
    assert [(step, each.state, each.steps) for step, each in changes] == [(2, "begin", 1), (15, "end", 2)]
    assert changes[0][1].message == "val/loss is nan"
    training = [{**GOOD, "loss": NAN}, *[{"val/loss": 1.0}] * 20]
    assert [each.state for _, each in run(NonFinite(), training)] == ["begin"]


# Layers

def layers(metric, **values):
    return {"loss": 1.0, **{f"{metric}/{name}": value for name, value in values.items()}}


def test_a_dead_layer_is_named_after_twenty_records():
    rows = [layers("activation/zero_fraction", a=0.5, b=0.97)] * 5 + [layers("activation/zero_fraction", a=0.5, b=1.0)] * 25
    ((step, incident),) = run(DeadLayer(), rows)
    assert (step, incident.where, incident.metric, incident.value) == (25, "b", "activation/zero_fraction/b", 1.0)
    assert incident.message == "activation/zero_fraction/b is 1: the layer is dead, for 20 records in a row, since step 6"
    assert begins(DeadLayer(records=3), [layers("activation/rms", a=0.0, b=1.0)] * 5) == [(3, "a")]
    assert begins(DeadLayer(zero_fraction=0.9, records=1), [layers("activation/zero_fraction", a=0.89, b=0.9)]) == [(1, "b")]


def test_one_living_record_begins_the_count_anew():
    dead, alive = layers("activation/rms", a=0.0), layers("activation/rms", a=1.0)
    assert run(DeadLayer(), ([dead] * 19 + [alive]) * 4) == []


def test_a_record_without_the_layer_does_not_begin_the_count_anew():
    dead = layers("activation/rms", a=0.0, b=1.0)
    other = [{"val/loss": 1.0}, layers("activation/rms", b=1.0), {**dead, "activation/rms/c": NAN}]
    assert begins(DeadLayer(records=6), [dead, *other, dead, *other, dead, dead, dead]) == [(10, "a")]


def test_layers_that_die_together_are_one_incident_and_a_later_one_is_another():
    names = [f"cell{i}" for i in range(7)]

    def row(dead):
        return layers("activation/rms", **{name: float(name not in dead) for name in names})

    rows = [row(names[:4])] * 3 + [row(names[:5])] * 40 + [row(names[:6])] * 10 + [row(names[5:6])] * 10 + [row([])] * 5
    changes = run(DeadLayer(records=3), rows)
    assert [(step, each.state, each.where) for step, each in changes] == [
        (3, "begin", "cell0"), (46, "begin", "cell5"), (58, "end", "cell0"), (68, "end", "cell5")]
    # The fifth died two records later, and is with the first four.
    assert changes[0][1].message.endswith("; likewise cell1, cell2, cell3")
    many = run(DeadLayer(records=1), [row(names)])
    assert many[0][1].message.endswith("; likewise cell1, cell2, cell3 and 3 more")


def test_a_layer_that_dies_by_degrees_is_one_incident():
    """Nearly all zeros at first, and then nothing else, which another metric tells of as well."""
    def row(zeros, rms):
        return {**layers("activation/zero_fraction", a=zeros, b=0.5), **layers("activation/rms", a=rms, b=1.0)}

    rows = [row(0.9995, 0.01)] * 6 + [row(1.0, 0.0)] * 9
    assert begins(DeadLayer(records=3, quiet=2), rows) == [(3, "a")]
    # An activation that is saturated and a gradient that is are two matters.
    high = {"activation/absmax/a": 65504.0, "activation_grad/absmax/a": 1.0}
    both = {name: 65504.0 for name in high}
    assert len(begins(HalfSaturation(quiet=2), [high] * 6 + [both] * 9)) == 2


def test_a_layer_that_comes_back_to_life_for_a_moment_is_in_the_same_incident():
    dead, alive = layers("activation/rms", a=0.0), layers("activation/rms", a=1.0)
    changes = run(DeadLayer(records=2), [dead] * 5 + [alive] + [dead] * 5 + [alive] * 9 + [dead] * 2)
    assert [(each.state, each.first_step, each.last_step, each.steps) for _, each in changes] == [
        ("begin", 2, 2, 1), ("end", 2, 11, 8), ("begin", 22, 22, 1)]


def test_each_incident_says_what_it_found():
    bad, worse, good = (layers("activation/absmax", a=value, b=value) for value in (60000.0, 65504.0, 1.0))
    changes = run(HalfSaturation(quiet=2), [bad, worse, good, good, {**worse, "activation/absmax/a": 1.0}, good])
    assert [(each.state, each.where, each.value) for _, each in changes] == [
        ("begin", "a", 60000.0), ("end", "a", 60000.0), ("begin", "b", 65504.0)]


def test_a_dead_layer_that_the_record_does_not_have_is_not_judged():
    both, one = layers("activation/rms", a=0.0, b=1.0), layers("activation/rms", b=1.0)
    changes = run(DeadLayer(records=2), [both] * 3 + [one] * 50 + [both])
    assert [(each.state, each.steps) for _, each in changes] == [("begin", 1)]


def test_the_gradient_of_a_layer_vanishes():
    good = {"grad/norm": 1.0, "grad/nonfinite": 0.0, "grad/norm/a": 0.8, "grad/norm/b": 0.6, "weight/norm/a": 1.0,
            "weight/norm/b": 1.0}
    for value in (0.0, 1e-11, NAN):  # NaN while the total is finite: the squares are too small for a float32
        assert begins(VanishingGradient(), [good] * 30 + [{**good, "grad/norm/b": value}] * 25) == [(50, "b")]
    assert begins(VanishingGradient(layer_fraction=1e-3), [{**good, "grad/norm/a": 9e-4}] * 20) == [(20, "a")]
    assert run(VanishingGradient(), [{**good, "grad/norm/b": 1e-9}] * 60) == []
    no_weights = {name: value for name, value in good.items() if not name.startswith("weight")}
    assert run(VanishingGradient(), [{**no_weights, "grad/norm/a": 1e-20}] * 60) == []


def test_all_gradients_vanish():
    ((_, incident),) = run(VanishingGradient(), [{"grad/norm": 2.0}] * 20 + [{"grad/norm": 1e-6}] * 25)
    assert incident.first_step == 40 and "grad/norm is 1e-06, below 1e-06 of what it was at first" in incident.message
    ((_, incident),) = run(VanishingGradient(), [{"grad/norm": 0.0}] * 25)
    assert incident.message == "grad/norm is 0, for 20 records in a row, since step 1" and incident.where == ""
    ((_, incident),) = run(VanishingGradient(), [{"grad/norm": NAN, "grad/nonfinite": 0.0}] * 25)
    assert "below what float32 can hold" in incident.message
    assert run(VanishingGradient(), [{"grad/norm": 10.0 * 0.9 ** min(i, 90)} for i in range(200)]) == []


@pytest.mark.parametrize("more", [{"skipped": 1.0}, {"overflow": 1.0, "grad/norm": INF},
                                  {"grad/nonfinite": 1.0, "grad/norm": NAN}])
def test_steps_that_say_nothing_of_the_gradient_are_passed_over(more):
    row = {"grad/norm": 0.0, "grad/nonfinite": 0.0, **more}
    assert run(VanishingGradient(), [row] * 60) == []
    assert VanishingGradient().check(Record(1, 0.0, row)) is NOT_JUDGED


def test_updates_out_of_range():
    good = layers("update/ratio", a=1e-3, b=INF)
    assert begins(UpdateRatio(), [good] * 19 + [layers("update/ratio", a=0.2, b=1e-3)] * 30) == [(39, "a")]
    assert begins(UpdateRatio(), [layers("update/ratio", a=1e-9, b=1e-3)] * 20) == [(20, "a")]
    assert begins(UpdateRatio(low=1e-4, high=1e-2, records=1), [layers("update/ratio", a=1e-3, b=2e-2)]) == [(1, "b")]
    assert run(UpdateRatio(), [{**layers("update/ratio", a=0.0), "skipped": 1.0}] * 60) == []
    assert run(UpdateRatio(), [layers("update/ratio", a=NAN)] * 60) == []
    message = run(UpdateRatio(records=1), [layers("update/ratio", a=0.2)])[0][1].message
    assert message == "update/ratio/a is 0.2, above 0.1"


def test_small_updates_at_both_ends_of_a_schedule_are_right():
    schedule = [warm_up_and_cosine(t, 3000) for t in range(3001)]
    rows = [{"learning_rate": rate, "update/ratio/a": 1e-3 * rate} for rate in schedule]
    assert run(UpdateRatio(low=5e-8), rows) == []
    assert begins(UpdateRatio(low=1e-6), rows[:600])[0][0] > 100  # once the rate is near its largest


def test_half_precision_is_saturated():
    rows = [layers("activation/absmax", a=100.0, b=60000.0 if i == 4 else 100.0) for i in range(12)]
    changes = run(HalfSaturation(), rows)
    assert [(step, each.state, each.where) for step, each in changes] == [(5, "begin", "b"), (10, "end", "b")]
    assert begins(HalfSaturation(), [layers("activation/absmax", a=65504.0)]) == [(1, "a")]
    assert begins(HalfSaturation(fraction=0.5), [layers("activation/absmax", a=33000.0)]) == [(1, "a")]
    assert run(HalfSaturation(), [layers("activation/absmax", a=58000.0, b=NAN, c=INF)] * 3) == []


def test_what_was_seen_above_half_precision_is_none():
    assert run(HalfSaturation(), [layers("activation/absmax", a=value) for value in (70000.0, 65000.0, 65504.0)]) == []
    assert begins(HalfSaturation(), [layers("activation/absmax", a=value, b=65504.0) for value in (7e9, 65e3)]) == [(1, "b")]


def test_gradients_are_judged_as_float16_had_to_hold_them():
    row = layers("activation_grad/absmax", a=66.0, b=1.0)
    assert begins(HalfSaturation(), [{**row, "loss_scale": 1024.0}] * 3) == []  # above: no float16
    row = layers("activation_grad/absmax", a=63.9, b=1.0)
    assert begins(HalfSaturation(), [{**row, "loss_scale": 1024.0}]) == [(1, "a")]
    assert run(HalfSaturation(), [row] * 3) == []
    assert run(HalfSaturation(), [{**row, "loss_scale": 1024.0, "overflow": 1.0, "skipped": 1.0}] * 3) == []
    for scale in (0.0, NAN, INF):
        assert run(HalfSaturation(), [{**row, "activation_grad/absmax/a": INF, "loss_scale": scale}] * 3) == []


# Learning rate

def rates(values, every=1):
    return [(i * every, {"learning_rate": value, "loss": 1.0}) for i, value in enumerate(values, 1)]


@pytest.mark.parametrize("every", [1, 10, 100])
@pytest.mark.parametrize("schedule", [
    warm_up_and_cosine, step_decay,
    lambda t, n: 1e-3 * min(t / 50, 1) * max(1 - t / n, 0),                                     # linear, to exactly 0
    lambda t, n: 1e-3 * min(t / 4000, (t / 4000) ** -0.5 if t else 0),                          # inverse root
    lambda t, n: 1e-3 * 0.97 ** (t // 100),
    lambda t, n: 1e-3 * min(1, (t // 200) / 5),                                                 # warm-up in stairs from 0
    lambda t, n: 1e-6 + 1e-3 * math.sin(math.pi * min(max(t - 1, 0), n) / n) ** 2,                   # one cycle
    lambda t, n: 0.01 if t < 500 else 0.1,                                                      # a low rate before training
    lambda t, n: 1e-7 * 1.02 ** min(t, 400), lambda t, n: 0.0, lambda t, n: 3e-4])
def test_usual_schedules_do_not_jump(schedule, every):
    steps = [t for t in range(1, 3001) if t == 1 or t % every == 0]
    assert run(LearningRate(), [(t, {"learning_rate": schedule(t, 3000)}) for t in steps]) == []


@pytest.mark.parametrize("before, after", [(1e-3, 2e-2), (1e-3, 1e-6), (1e-3, 0.0)])
def test_a_jump_is_one_incident_of_one_record(before, after):
    changes = run(LearningRate(), rates([before] * 50 + [after] * 50))
    assert [(step, each.state, each.steps) for step, each in changes] == [(51, "begin", 1), (52, "end", 1)]
    assert f"at once, from {before:.4g} to {after:.4g}" in changes[0][1].message and changes[0][1].value == after


def test_a_warm_up_that_ends_elsewhere_is_a_jump():
    assert begins(LearningRate(), rates([1e-6 * i for i in range(1, 101)] + [1e-2] * 20)) == [(101, "")]


def test_restarts_are_jumps_unless_they_are_said_to_be_right():
    cosine = [5e-4 * (1 + math.cos(math.pi * (t % 200) / 200)) for t in range(600)]
    assert [step for step, _ in begins(LearningRate(), rates(cosine))] == [201, 401]
    assert run(LearningRate(restarts=True), rates(cosine)) == []
    assert begins(LearningRate(restarts=True), rates(cosine + [1.0])) == [(601, "")]


@pytest.mark.parametrize("value", [NAN, INF, -1e-3])
def test_a_rate_that_can_be_none_is_an_alarm(value):
    assert begins(LearningRate(), rates([1e-3, value, 1e-3])) == [(2, "")]
    assert begins(LearningRate(), rates([value])) == [(1, "")]


def test_the_rate_of_a_group_jumps():
    rows = [{"learning_rate/body": 1e-3, "learning_rate/head": 1e-3 if i < 40 else 0.1} for i in range(60)]
    assert begins(LearningRate(), rows) == [(41, "head")]


def test_records_without_a_rate_come_between():
    rows = [(t, {"learning_rate": 1e-3} if t % 8 == 0 else {"val/loss": 1.0} if t % 3 else {"loss": 1.0})
            for t in range(1, 200)]
    assert run(LearningRate(), rows) == []
    assert begins(LearningRate(), [*rows, (200, {"learning_rate": 1.0})]) == [(200, "")]


def test_a_rate_that_stands_still_where_it_should_fall():
    changes = run(LearningRate(flat_after=100), rates([1e-3 - 1e-6 * i for i in range(200)] + [8e-4] * 150 + [7e-4] * 5))
    assert [(step, each.state) for step, each in changes] == [(302, "begin"), (351, "end")]
    assert changes[0][1].message == "learning_rate has been 0.0008 since step 201, longer than 100 steps"
    assert begins(LearningRate(flat_after=100), rates([1e-3] * 30, every=10)) == [(120, "")]  # counted in steps
    assert run(LearningRate(), rates([1e-3] * 3000)) == []


def rising(seed, *, warm_up=100, rise=0.005, noise=0.05, steps=400):
    """The loss falls during the warm-up, and rises after it by `rise` a step."""
    random = np.random.default_rng(seed)
    for t in range(1, steps + 1):
        loss = 5 - 0.01 * min(t, warm_up) + rise * max(t - warm_up, 0) + noise * random.normal()
        yield {"learning_rate": 1e-3 * min(t / warm_up, 1) if warm_up else 1e-3, "loss": loss}


@pytest.mark.parametrize("warm_up", [0, 100])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_rises_after_the_warm_up(seed, warm_up):
    ((step, incident),) = run(LearningRate(), rising(seed, warm_up=warm_up))
    assert warm_up + 99 <= step <= warm_up + 125 and incident.metric == "loss"
    assert "since the rate stopped rising (learning_rate is 0.001): it is too high" in incident.message


@pytest.mark.parametrize("rise", [0.0, -0.005, 0.0005])
def test_a_loss_that_only_varies_after_the_warm_up_is_no_alarm(rise):
    for seed in range(30):
        assert run(LearningRate(), rising(seed, rise=rise)) == []
    assert run(LearningRate(rising=None), rising(0)) == []


def test_a_rise_ends_with_the_first_stretch_in_which_the_loss_falls():
    rows = [*rising(0), *[{"learning_rate": 1e-3, "loss": 4.0}] * 200]
    changes = run(LearningRate(), rows)
    assert [each.state for _, each in changes] == ["begin", "end"] and 400 < changes[1][0] <= 425
    changes = run(LearningRate(), [*rows, *[{"learning_rate": 1e-3, "loss": 4 + 0.01 * i} for i in range(300)]])
    assert len(changes) == 2  # long after the warm-up it is not the rate


def test_the_loss_may_be_anything_while_the_rate_rises():
    assert run(LearningRate(), [{"learning_rate": 1e-6 * t, "loss": 1.0 + t} for t in range(1, 300)]) == []


# Time

def test_a_lasting_drop_of_throughput():
    times = [30.0] + [0.2] * 100 + [0.5] * 30 + [0.2] * 10
    changes = run(ThroughputDrop(), [{"step_time": value} for value in times])
    assert [(step, each.state, each.steps) for step, each in changes] == [(121, "begin", 1), (136, "end", 11)]
    assert changes[0][1].message == "step_time is 0.5, and was 0.2 (median): 2.5 times slower, for 20 records in a row"
    rate = [{"samples_per_second": 1 / value} for value in times]
    assert begins(ThroughputDrop(metric="samples_per_second"), rate) == [(121, "")]
    assert run(ThroughputDrop(factor=3.0), [{"step_time": value} for value in times]) == []


def test_slow_steps_now_and_then_and_bad_times_are_no_drop():
    times = [0.2 * (1 + 9 * (t % 20 == 0)) for t in range(400)]
    assert run(ThroughputDrop(), [{"step_time": value} for value in times]) == []
    for value in (NAN, INF, 0.0, -1.0):
        assert ThroughputDrop().check(Record(1, 0.0, {"step_time": value})) is NOT_JUDGED
        assert run(ThroughputDrop(), [{"step_time": value if i % 2 else 0.2} for i in range(200)]) == []


def test_a_drop_has_to_last_for_a_second():
    times = [30.0] + [0.002] * 100 + [0.005] * 199
    assert run(ThroughputDrop(window=1000), [{"step_time": value} for value in times]) == []
    assert begins(ThroughputDrop(window=1000), [{"step_time": value} for value in [*times, 0.006]]) == [(301, "")]
    assert begins(ThroughputDrop(seconds=0.1), [{"step_time": value} for value in times]) == [(121, "")]


def test_a_lasting_new_pace_becomes_the_usual_one():
    changes = run(ThroughputDrop(window=50), [{"step_time": value} for value in [0.2] * 60 + [1.0] * 200])
    assert [each.state for _, each in changes] == ["begin", "end"] and changes[1][0] == 60 + 26 + 5


def test_training_starves():
    hungry = {"data_wait_fraction": 0.7, "step_time": 1.0}
    assert begins(DataStarved(), [hungry] * 60) == [(51, "")]
    assert run(DataStarved(), [{**hungry, "data_wait_fraction": 0.4}] * 200) == []
    assert begins(DataStarved(window=5, fraction=0.3), [{"data_wait_fraction": 0.31}] * 20) == [(6, "")]
    message = run(DataStarved(), [hungry] * 60)[0][1].message
    assert message.startswith("training waited for data for 70% of the time of the last 50 records")


def test_long_waits_count_by_their_length():
    # one step of four waits 0.9 of 10 s, the others wait for nothing, and take 1 s: 9 of 13 s
    rows = [{"data_wait_fraction": 0.9 if t % 4 == 0 else 0.0, "step_time": 10.0 if t % 4 == 0 else 1.0} for t in range(100)]
    assert len(begins(DataStarved(), rows)) == 1
    assert run(DataStarved(), [{**row, "step_time": 1.0} for row in rows]) == []


def test_the_start_of_the_pipeline_does_not_count():
    rows = [{"data_wait_fraction": 1.0, "step_time": 1e4}] + [{"data_wait_fraction": 0.1, "step_time": 1.0}] * 90
    assert run(DataStarved(), rows) == []
    for bad in ({"data_wait_fraction": NAN}, {"data_wait_fraction": 0.9, "step_time": NAN}, {"step_time": 1.0}):
        assert DataStarved().check(Record(1, 0.0, bad)) is NOT_JUDGED


# SlowRank

def waits(rank, most, least=0.01, time=1.0):
    return {"rank/min/data_wait": least, "rank/max/data_wait": most, "rank/argmax/data_wait": float(rank),
            "rank/max/step_time": time, "rank/min/step_time": time}


def test_a_rank_that_all_wait_for_is_named():
    assert begins(SlowRank(), [waits(3, 0.31)] * 60) == [(51, "rank 3")]
    incident = run(SlowRank(), [waits(0, 0.01)] * 40 + [waits(3, 0.31)] * 60)[0][1]
    # 0.3 s late in 17 of the last 50 records, of a second each
    assert incident.where == "rank 3" and incident.value == 0.31
    assert incident.message.startswith("rank 3 waited for its data the longest in 17 of the last 50 records, and the first "
                                       "rank was ready before it by 10% of the time")
    assert begins(SlowRank(window=2, fraction=0.5), [waits(1, 0.52)] * 5) == [(3, "rank 1")]


@pytest.mark.parametrize("rows", [
    [waits(3, 0.1)] * 200,  # nine hundredths
    [waits(t % 2, 0.5) for t in range(200)],  # they take turns
    [waits(1, 0.9, least=0.85)] * 200,  # all of them wait: DataStarved says so
    [waits(3, 50.0)] + [waits(0, 0.01)] * 200,  # the pipelines start
    [waits(0, 0.01)] * 60 + [waits(3, 50.0, time=50.0)] + [waits(1, 0.02)] * 60,  # one long pause
    [{"data_wait": 0.5, "step_time": 1.0}] * 200])
def test_ranks_that_are_alike_are_no_alarm(rows):
    assert run(SlowRank(), rows) == []


@pytest.mark.parametrize("bad", [{"rank/max/data_wait": NAN}, {"rank/min/data_wait": INF}, {"rank/argmax/data_wait": NAN},
                                 {"rank/max/step_time": NAN}, {"rank/max/step_time": 0.0}])
def test_times_of_ranks_that_are_not_known_are_not_judged(bad):
    assert SlowRank().check(Record(1, 0.0, {**waits(1, 0.5), **bad})) is NOT_JUDGED


# Overfitting

def epochs(training, validation):
    for epoch, (loss, val) in enumerate(zip(training, validation)):
        yield from ((epoch * 10 + t, {"loss": loss + 0.1 * (t % 2)}) for t in range(1, 11))
        yield epoch * 10 + 10, {"val/loss": val}


def test_validation_rises_while_training_falls():
    falling = [1.0 / (1 + i) for i in range(9)]
    changes = run(Overfitting(), epochs(falling, [1.0, 0.8, 0.7, 0.72, 0.75, 0.8, 0.9, 0.85, 0.8]))
    assert [(step, each.state, each.steps) for step, each in changes] == [(60, "begin", 1), (80, "end", 2)]
    assert changes[0][1].message == ("val/loss has risen 3 times in a row, from 0.7 to 0.8, while loss fell from 0.3833 to "
                                     "0.2167 (means between validations)")


def test_overfitting_lasts_while_the_validation_loss_rises_less_or_stands_still():
    validation = [0.7, 0.72, 0.75, 0.8, 0.8, 0.801, 0.802, 0.803, 0.802, 0.803]
    training = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.5, 0.3, 0.2]
    changes = run(Overfitting(), epochs(training, validation))
    assert [(step, each.state, each.steps) for step, each in changes] == [(40, "begin", 1), (90, "end", 5)]


def test_neither_rising_together_nor_varying_is_overfitting():
    rises = [0.5, 0.6, 0.7, 0.8, 0.9]
    assert run(Overfitting(), epochs(rises, rises)) == []
    assert run(Overfitting(), epochs([1.0, 0.9, 0.8, 0.7, 0.6], [0.5, 0.501, 0.502, 0.503, 0.504])) == []
    assert run(Overfitting(), epochs([1.0, 0.9, 0.8, 0.7, 0.6], [0.5, 0.6, 0.55, 0.7, 0.65])) == []
    assert begins(Overfitting(validations=1, rise=0.1), epochs([1.0, 0.5], [1.0, 1.2])) == [(20, "")]


def test_what_is_not_finite_or_was_left_out_is_not_in_the_mean():
    rows = list(epochs([1.0, 0.9, 0.8, 0.7], [0.5, 0.6, 0.7, 0.8]))
    extra = [{"loss": NAN}, {"loss": INF}, {"loss": 1e9, "skipped": 1.0}, {"val/loss": NAN}, {"val/accuracy": 0.1}]
    mixed = [each for step, values in rows for each in [*((step, more) for more in extra), (step, values)]]
    assert begins(Overfitting(), rows) == begins(Overfitting(), mixed) == [(40, "")]


def test_validation_without_training_says_nothing():
    assert Overfitting().check(Record(1, 0.0, {"val/loss": 1.0})) is NOT_JUDGED
    both = [{"loss": 1 / i, "val/loss": float(i)} for i in range(1, 6)]  # in one record
    assert begins(Overfitting(), both) == [(4, "")]


# Arguments

@pytest.mark.parametrize("cls, options, message", [
    (NonFinite, {"overflows": 0}, "`overflows` must be a whole number from 1, but it is 0"),
    (DeadLayer, {"zero_fraction": 1.5}, "`zero_fraction` must be a number above 0 and up to 1, but it is 1.5"),
    (DeadLayer, {"records": True}, "`records`"), (UpdateRatio, {"low": 0.2}, "`high` must be.*above `low`"),
    (UpdateRatio, {"low": 0}, "`low`"), (HalfSaturation, {"fraction": 0}, "`fraction`"), (LearningRate, {"up": 1}, "`up`"),
    (LearningRate, {"down": 0.5}, "`down`"), (LearningRate, {"flat_after": 0}, "`flat_after`"),
    (LearningRate, {"rising": 10}, "`rising` must be a whole number from 16"), (ThroughputDrop, {"factor": 1}, "`factor`"),
    (ThroughputDrop, {"window": 10}, "`warm_up` must be at most `window`"), (DataStarved, {"window": 0}, "`window`"),
    (DataStarved, {"fraction": NAN}, "`fraction`"), (SlowRank, {"fraction": 1.5}, "`fraction`"),
    (SlowRank, {"window": 0}, "`window`"), (Overfitting, {"validations": 0}, "`validations`"),
    (Overfitting, {"rise": -1}, "`rise`"), (VanishingGradient, {"fraction": 2}, "`fraction`"),
    (VanishingGradient, {"layer_fraction": "x"}, "`layer_fraction`"), (VanishingGradient, {"warm_up": 0}, "`warm_up`")])
def test_refused(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**options)


def test_a_custom_alarm_of_layers():
    from instrument.alarms import LayerAlarm

    class LargeWeights(LayerAlarm):
        def judge(self, record):
            group, values = self.columns.select(record, "weight/norm/")
            yield group, values, values > 10

        def describe(self, metric, value):
            return f"{metric} is {value:g}"

    verdict = LargeWeights(records=1).check(Record(1, 0.0, {"weight/norm/a": 11.0, "weight/norm/b": 1.0}))
    assert [each.where for each in verdict.values() if isinstance(each, Finding)] == ["a"]
