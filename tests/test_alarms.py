"""Incidents: when they begin and end, what does not end them, and what an alarm may do wrong."""
import pickle
import subprocess
import sys

import numpy as np
import pytest

from instrument.alarms import (
    NOT_JUDGED,
    Alarm,
    AlarmRaised,
    AlarmSet,
    Finding,
    GradientSpike,
    LossSpike,
    NonFinite,
    UpdateRatio,
    default_alarms,
)
from instrument.alarms.columns import Columns
from instrument.record import Incident, Record


class TooHigh(Alarm):
    """A class of a user's own, without an __init__."""

    quiet = 3

    def check(self, record):
        loss = record.values.get("loss")
        if loss is None:
            return NOT_JUDGED
        return Finding(f"the loss is {loss}", "loss", loss, "here") if loss > 10 else None


class ByKey(Alarm):
    """Says of each metric that the record has whether it is 1."""

    quiet = 2

    def __init__(self):
        self.known = set()

    def check(self, record):
        self.known.update(record.values)
        found = {name: Finding(name) for name, value in record.values.items() if value == 1}
        return {**{name: NOT_JUDGED for name in self.known - set(record.values)}, **found}


def watch(alarm, losses):
    """Incidents of records with these losses, from step 1; None is a record without a loss."""
    alarms = AlarmSet([alarm])
    records = [Record(step, 0.0, {} if loss is None else {"loss": loss}) for step, loss in enumerate(losses, 1)]
    return [alarms.observe(record) for record in records], alarms


def ends(changes):
    return [(each.first_step, each.last_step, each.steps) for step in changes for each in step if each.state == "end"]


def test_one_incident_with_its_length():
    changes, alarms = watch(TooHigh(), [1, 11, 12, 13, 1, 1, 1, 1])
    begin = Incident("TooHigh", "begin", 2, 2, 1, "the loss is 11", "loss", 11, "here")
    end = Incident("TooHigh", "end", 2, 4, 3, "the loss is 11", "loss", 11, "here")
    assert changes == [(), (begin,), (), (), (), (), (end,), ()]
    assert str(begin) == "TooHigh at step 2: the loss is 11"
    assert alarms.finish() == ()


def test_what_flickers_is_one_incident():
    changes, _ = watch(TooHigh(), [11, 1, 1, 11, 1, 1, 11, 1, 1, 1, 11])
    assert ends(changes) == [(1, 7, 3)]
    assert [len(step) for step in changes] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_a_record_without_the_metric_neither_ends_nor_prolongs():
    changes, alarms = watch(TooHigh(), [None, 11, *[None] * 20, 11, 1, None, 1, None, None, None, 1])
    assert ends(changes) == [(2, 23, 2)] and [bool(step) for step in changes].index(True) == 1
    assert len(changes[-1]) == 1  # it takes three records in which all is well, with others between them
    assert alarms.finish() == ()


def test_records_of_one_step_count_once():
    alarms = AlarmSet([TooHigh()])
    for step in (1, 1, 2, 2):
        alarms.observe(Record(step, 0.0, {"loss": 11}))
    assert alarms.finish()[0].steps == 2


def test_the_end_of_training_ends_what_is_well_again():
    changes, alarms = watch(TooHigh(), [1, 11, 1])
    assert [(each.state, each.first_step, each.last_step) for each in alarms.finish()] == [("end", 2, 2)]
    assert alarms.finish() == ()
    assert [each.state for each in alarms.observe(Record(4, 0.0, {"loss": 11}))] == ["begin"]  # training goes on


def test_what_is_not_over_when_training_ends_is_told_so_and_begins_anew_after_it():
    changes, alarms = watch(TooHigh(), [1, 11, 11])
    (still,) = alarms.finish()
    assert (still.state, still.first_step, still.last_step, still.steps) == ("open", 2, 3, 2)
    assert str(still) == "TooHigh was not over when training ended: it was seen in 2 recorded steps, from step 2 to step 3"
    assert alarms.finish() == ()  # told once
    (again,) = alarms.observe(Record(4, 0.0, {"loss": 11}))  # training goes on: the policy is to act again
    assert (again.state, again.first_step) == ("begin", 4)


def test_quiet_is_the_users():
    alarm = TooHigh()
    alarm.quiet = 1
    assert ends(watch(alarm, [11, 1, 11, 1])[0]) == [(1, 1, 1), (3, 3, 1)]


def test_several_incidents_of_one_alarm_by_key():
    alarms = AlarmSet([ByKey()])
    rows = [{"a": 1, "b": 0}, {"a": 1, "b": 1}, {"a": 0}, {"a": 0}, {"b": 1}, {"b": 0}, {"b": 0}]
    states = [[(each.message, each.state) for each in alarms.observe(Record(step, 0.0, values))]
              for step, values in enumerate(rows, 1)]
    assert states == [[("a", "begin")], [("b", "begin")], [], [("a", "end")], [], [], [("b", "end")]]


def test_an_alarm_that_fails_is_named_and_the_others_go_on():
    class Broken(Alarm):
        def check(self, record):
            if record.step == 3:
                return None
            raise ZeroDivisionError("by me")

    alarms = AlarmSet([Broken(), TooHigh()])
    assert [each.alarm for each in alarms.observe(Record(1, 0.0, {"loss": 11}))] == ["TooHigh"]
    ((name, error),) = alarms.errors
    assert name == "Broken" and isinstance(error, ZeroDivisionError)
    alarms.observe(Record(3, 0.0, {"loss": 1}))
    assert alarms.errors == ()


def test_the_incident_of_an_alarm_that_fails_goes_on():
    class Sometimes(TooHigh):
        def check(self, record):
            if record.values["loss"] == 5:
                raise RuntimeError
            return super().check(record)

    assert ends(watch(Sometimes(), [11, 5, 5, 5, 5, 1, 1, 1])[0]) == [(1, 1, 1)]


@pytest.mark.parametrize("verdict", [True, "bad", [Finding("x")], {"a": None}])
def test_another_verdict_is_an_error_of_the_alarm(verdict):
    class Wrong(Alarm):
        def check(self, record):
            return verdict

    alarms = AlarmSet([Wrong()])
    assert alarms.observe(Record(1, 0.0, {})) == ()
    assert isinstance(alarms.errors[0][1], TypeError) and "NOT_JUDGED" in str(alarms.errors[0][1])


def test_names():
    assert [alarm.name for alarm in (TooHigh(), LossSpike(), LossSpike(name="aux"))] == ["TooHigh", "LossSpike", "aux"]
    with pytest.raises(ValueError, match="different names, but LossSpike occurs twice.*name="):
        AlarmSet([LossSpike(), LossSpike(metric="loss/aux")])
    assert len(AlarmSet([LossSpike(), LossSpike(metric="loss/aux", name="aux")])) == 2


def test_only_alarms_are_taken():
    with pytest.raises(TypeError, match=r"Use NonFinite\(\)"):
        AlarmSet([NonFinite])
    with pytest.raises(TypeError, match="Derive its class from Alarm"):
        AlarmSet([print])


def test_policies():
    incident = Incident("NonFinite", "begin", 3, 3, 1, "loss is nan")
    for policy in ("log", "stop", "raise", print):
        assert AlarmSet([LossSpike(), NonFinite(policy=policy)]).policy_of(incident) == policy
    assert repr(NonFinite(policy=print)) == "<NonFinite: print>" and repr(NonFinite()) == "<NonFinite: log>"
    for policy in ("halt", None, 1):
        with pytest.raises(ValueError, match="`policy` must be 'log', 'stop', 'raise' or a function"):
            NonFinite(policy=policy)
    error = pickle.loads(pickle.dumps(AlarmRaised(incident)))
    assert str(error) == str(incident) == "NonFinite at step 3: loss is nan" and error.incident == incident
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("cls", [type(alarm) for alarm in default_alarms()] + [UpdateRatio], ids=lambda cls: cls.__name__)
def test_each_has_policy_name_and_quiet_and_bounds_them(cls):
    alarm = cls(policy="stop", name="mine", quiet=7)
    assert (alarm.policy, alarm.name, alarm.quiet) == ("stop", "mine", 7)
    assert cls().name == cls.__name__ and cls().policy == "log"
    with pytest.raises(ValueError, match="`quiet` must be a whole number from 1, but it is 0"):
        cls(quiet=0)
    assert cls.__doc__ and alarm.needs


def test_what_has_nothing_to_look_at_is_told():
    alarms = AlarmSet([UpdateRatio(), GradientSpike(), LossSpike(metric="loss/aux"), TooHigh()])
    assert len(alarms.blind()) == 3  # of a class of one's own that does not say what it needs, nothing is known
    alarms.observe(Record(1, 0.0, {"loss": 1.0, "grad/norm": 1.0}))
    assert alarms.blind() == ("alarm UpdateRatio has nothing to look at: it needs update/ratio/.... Make the step with "
                              "updates=True and per_parameter=True.",
                              "alarm LossSpike has nothing to look at: it needs loss/aux.")
    alarms.observe(Record(2, 0.0, {"loss": 1.0, "update/ratio/w": 1.0}))
    alarms.observe(Record(3, 0.0, {"loss": 1.0, "grad/norm": 1.0}))
    assert len(alarms.blind()) == 1


def test_a_monitor_can_tell_where_the_nan_came_from():
    own = NonFinite(first_nonfinite=lambda values: None, name="own")
    alarms = AlarmSet([NonFinite(), own, TooHigh()])
    alarms.locate_by(print)
    assert alarms.alarms[0].locate is print and own.first_nonfinite is not print


def test_reset_forgets_everything():
    alarms = AlarmSet(default_alarms())
    records = [Record(i, 0.0, {"loss": 1.0 + i % 3 / 1000, "grad/norm": 1.0}) for i in range(1, 60)]
    for record in records:
        alarms.observe(record)
    spike = Record(60, 0.0, {"loss": 9.0, "grad/norm": 99.0})
    assert {each.alarm for each in alarms.observe(spike)} == {"LossSpike", "GradientSpike"}
    alarms.reset()
    assert alarms.finish() == () and alarms.observe(spike) == () and alarms.errors == ()


def test_columns_select_by_prefix_in_any_order_of_kinds():
    columns = Columns()
    first = Record(1, 0.0, {"grad/norm": 1.0, "grad/norm/a": 2.0, "x": 3.0, "grad/norm/b": float("nan")})
    second = Record(1, 0.0, {"val/loss": 1, "grad/norm/a": 5.0})
    for _ in range(2):
        group, values = columns.select(first, "grad/norm/")
        assert group.names == ("a", "b") and group.metrics == ("grad/norm/a", "grad/norm/b")
        assert values[0] == 2 and values[1] != values[1]
        assert columns.select(second, "grad/norm/")[1].tolist() == [5.0]
        assert len(columns.select(second, "weight/")[0]) == 0
        assert np.isnan(columns.beside(second, columns.select(second, "grad/norm/")[0], "val/")).all()
    assert columns.select(first, "grad/norm/")[0] is group and columns.kinds == 2
    assert columns.beside(first, group, "grad/norm/")[0] == 2.0


def test_columns_of_many_kinds_stay_right():
    columns = Columns()
    for i in range(30):
        names = [f"a/{j}" for j in range(i % 11 + 1)]
        group, values = columns.select(Record(i, 0.0, {name: float(i) for name in names}), "a/")
        assert list(group.metrics) == names and (values == i).all() and len(values) == len(names)


def test_names_are_sorted_out_once():
    class Counted(str):
        asked = 0

        def startswith(self, *args):
            Counted.asked += 1
            return str.startswith(self, *args)

    names = [Counted(name) for name in ("loss", "grad/norm", "grad/norm/a", "activation/rms/b", "weight/norm/a")]
    alarms = AlarmSet(default_alarms())
    for step in range(1, 20):
        alarms.observe(Record(step, 0.0, dict.fromkeys(names, 1.0)))
        if step == 1:
            first = Counted.asked
    assert Counted.asked == first > 0


def test_alarms_load_without_mindspore():
    subprocess.run([sys.executable, "-c", "import sys, instrument.alarms\nassert 'mindspore' not in sys.modules"], check=True)
