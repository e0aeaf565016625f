"""`instrument compare`: what two runs reached, and where they part."""
import math

import numpy as np
import pytest

import instrument
from instrument import runs
from instrument.cli import main
from instrument.comparison import Comparison, _clock, divergence, first_apart
from instrument.reading import Series
from instrument.record import Incident, Record
from instrument.writers import JsonlWriter


def made(path, losses, *, first=1, accuracy=(), alarms=(), **settings):
    with runs.create(path, config={"hyper_parameters": settings}) as run:
        writer = JsonlWriter(run)
        writer.start(run.info())
        for step, loss in enumerate(losses, first):
            seen = tuple(each for each in alarms if each.first_step == step)
            writer.write(Record(step, 1.7e9 + 2.0 * step, {"loss": loss, "tokens_per_second": 100.0 * step}, alarms=seen))
        for step, value in accuracy:
            writer.write(Record(step, 1.7e9 + 2.0 * step, {"val/accuracy": value, "val/loss": 1.0 - value}))
        writer.close()
    return path


def rows(*paths):
    return {row.name: row.cells for row in Comparison([instrument.read(path) for path in paths]).rows}


def test_the_table_says_what_each_run_reached(tmp_path):
    nan = Incident("NonFinite", "begin", 2, 2, 1, "the loss is NaN", "loss", math.nan, "blocks.2")
    spikes = [Incident("LossSpike", "begin", step, step, 1, "far above", "loss", 9.0, "") for step in (1, 3)]
    one = made(tmp_path / "one", [4.0, 2.0, 3.0], accuracy=[(1, 0.25), (2, 0.75), (3, 0.5)], rate=0.1, layers=4)
    two = made(tmp_path / "two", [4.0, math.nan, 1.0, 0.5], alarms=[nan, *spikes], rate=0.2, layers=4)
    table = rows(one, two)
    assert table["last step"] == ("3", "4") and table["time"] == ("4 s", "6 s")
    assert table["loss, last"] == ("3", "0.5")
    assert table["loss, lowest"] == ("2 at step 2", "0.5 at step 4")
    assert table["val/accuracy, last"] == ("0.5", "") and table["val/accuracy, highest"] == ("0.75 at step 2", "")
    assert table["val/loss, lowest"] == ("0.25 at step 2", "") and "val/loss, highest" not in table
    assert table["tokens/s, median"] == ("200", "250")
    assert table["loss differs from"][1] == "step 2"
    assert table["alarms"] == ("none", "LossSpike 2×, first at step 1; NonFinite at step 2")
    assert table["rate ="] == ("0.1", "0.2") and "layers =" not in table


@pytest.mark.parametrize("first, other, expected", [
    ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], (None, None)),
    ([1.0, 2.0, 3.0], [1.0, 2.001, 4.0], (2, 3)),
    ([math.nan, 2.0], [math.nan, math.inf], (2, 2)),
    ([1.0, math.nan], [1.0, 2.0], (2, 2)),
    ([0.0, -1.0], [0.0, -1.02], (2, 2)),
    ([math.inf, 1.0], [math.inf, 1.0], (None, None)),
    ([1.0, math.inf], [1.0, 2.0], (2, 2)),
])
def test_where_two_series_part(first, other, expected):
    steps = np.arange(1, len(first) + 1)
    assert divergence(Series(steps, np.array(first)), Series(steps, np.array(other))) == expected


def test_only_steps_that_both_have_are_compared():
    one = Series(np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0]))
    assert divergence(one, Series(np.array([3, 5]), np.array([4.0, 0.0]))) == (3, 3)
    assert divergence(one, Series(np.array([4, 5]), np.array([4.0, 0.0]))) is None
    assert divergence(one, None) is None


def with_layers(path, change=lambda step, values: {}):
    with runs.create(path, config={}) as run:
        writer = JsonlWriter(run)
        writer.start(run.info())
        for step in range(1, 11):
            values = {"loss": 1.0, "grad/norm": 2.0, "grad/norm/a": 2.0, "grad/norm/keys.bias": 1e-8, "weight/norm/a": 5.0,
                      "activation/rms/one": 1.0, "activation/rms/two": 1.0, "activation/mean/two": 1e-9, "step_time": 0.1,
                      "learning_rate": 0.01}
            writer.write(Record(step, 1.7e9, {**values, **change(step, values)}))
        writer.close()
    return instrument.read(path)


def test_the_first_layer_in_which_two_runs_part_is_named(tmp_path):
    def another(step, values):
        """All rounded otherwise, what is nothing but rounding by half; from step 4 on a layer, and what follows from it."""
        rounded = {name: value * (1 + 1e-5) for name, value in values.items()}
        rounded.update({"grad/norm/keys.bias": 2e-8, "activation/mean/two": 2e-9, "step_time": 0.3})
        if step >= 4:
            rounded.update({"activation/rms/two": 1.5, "loss": 1.1, "grad/norm": math.nan})
        return rounded

    one, two = with_layers(tmp_path / "one"), with_layers(tmp_path / "two", another)
    assert first_apart(one, two) == (4, ["activation/rms/two", "loss", "grad/norm"])
    assert first_apart(two, one) == (4, ["activation/rms/two", "loss", "grad/norm"]) and first_apart(one, one) is None
    with_layers(tmp_path / "rate", lambda step, values: {"learning_rate": 0.02} if step > 8 else {})
    table = rows(tmp_path / "one", tmp_path / "two", tmp_path / "rate")
    assert table["first to part by 1%"] == ("", "activation/rms/two, step 4, and 2 more", "learning_rate, step 9")
    assert "first to part by 1%" not in rows(tmp_path / "one", tmp_path / "one")


@pytest.mark.parametrize("group, expected", [((0.01, 0.01), None), ((0.01, 0.02), (1, ["learning_rate/1"]))])
def test_a_rate_of_all_parameters_is_held_against_those_of_groups(tmp_path, group, expected):
    one = with_layers(tmp_path / "one")
    groups = with_layers(tmp_path / "groups")
    series = groups["learning_rate"]
    others = {name: groups[name] for name in groups if name != "learning_rate"}
    grouped = {**others, **{f"learning_rate/{i}": Series(series.step, np.full(10, rate)) for i, rate in enumerate(group)}}
    assert first_apart(one, grouped) == first_apart(grouped, one) == expected
    assert first_apart(one, others) is first_apart(others, one) is first_apart(grouped, grouped) is None


@pytest.mark.parametrize("seconds, said", [(0.0123, "0.0123 s"), (0.0, "0 s"), (59.0, "59 s"), (60.0, "0:01:00"),
                                           (3723.4, "1:02:03")])
def test_short_times_are_told_in_seconds(seconds, said):
    assert _clock(seconds) == said


def test_runs_of_one_name_are_told_apart(tmp_path):
    paths = [made(tmp_path / parent / "run", [1.0]) for parent in "ab"]
    read = [instrument.read(path) for path in paths]
    assert Comparison(read).names == ["a/run", "b/run"]
    assert len(set(Comparison([read[0], read[0]]).names)) == 2


def test_the_command_prints_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    one, two = made(tmp_path / "one", [4.0, 2.0]), made(tmp_path / "[red]", [4.0, 1.0])
    assert main(["compare", str(one), str(two)]) == 0
    out = capsys.readouterr().out
    assert "[red]" in out and "step 2" in out and "1 at step 2" in out
    assert main(["compare", str(one)]) == 1
    assert "needs two runs or more, but there are 1" in capsys.readouterr().err
    assert main(["compare", str(one), str(tmp_path / "tow")]) == 1
    assert "no run in" in capsys.readouterr().err
