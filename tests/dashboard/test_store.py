"""Columns of a run, and which of their points are drawn."""
import math
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from instrument.dashboard import catalog, decimate, maps, panels
from instrument.dashboard.drawn import Means
from instrument.dashboard.store import Store


def lines(*records):
    return b"".join(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" for record in records)


def record(step, **values):
    return {"step": step, "time": 1000.0 + step, **values}


def store_of(*records):
    store = Store()
    store.add_metrics(lines(*records))
    return store


def values_of(store, name):
    steps, _, values = store.series(name)
    return dict(zip(steps.tolist(), values.tolist()))


def test_columns_hold_what_the_lines_say():
    store = store_of(record(1, loss=2.5, lr=0.1), record(2, loss=2.25), {**record(2), "val/loss": 3.0},
                     record(3, loss=2.0, lr=0.2))
    assert store.names() == ["loss", "lr", "val/loss"]
    assert values_of(store, "loss") == {1: 2.5, 2: 2.25, 3: 2.0}
    assert values_of(store, "lr") == {1: 0.1, 3: 0.2}
    assert store.series("lr")[1].tolist() == [1001.0, 1003.0]
    assert store.span() == (1, 3)
    latest = store.latest("lr")
    assert (latest.step, latest.value, latest.least, latest.largest) == (3, 0.2, 0.1, 0.2)
    assert store.latest("none") is None and store.curve("none") is None


def test_what_is_not_finite_is_kept_as_such():
    store = store_of({**record(1, loss=None, a=None), "nonfinite": {"loss": "nan", "a": "-inf"}}, record(2, loss=1.0, a=2.0))
    assert math.isnan(values_of(store, "loss")[1]) and values_of(store, "a")[1] == -math.inf
    assert store.latest("a").least == 2.0


def test_lines_that_are_no_record_are_counted_and_left_out():
    store = Store()
    store.add_metrics(b'nonsense\n[1]\n{"loss":1}\n{"step":"x","loss":1}\n' + lines(record(1, loss=1.0)))
    assert store.skipped == 4 and values_of(store, "loss") == {1: 1.0}


def test_a_resumed_run_makes_later_steps_void():
    store = store_of(*(record(step, loss=float(step)) for step in range(1, 11)))
    generation = store.generation
    store.add_metrics(lines({**record(5), "resumed": True}))
    assert values_of(store, "loss") == {step: float(step) for step in range(1, 6)}
    assert store.generation > generation and store.last_step == 5
    # Mark and lines in one block, with lines of the time before it.
    store.add_metrics(lines(record(6, loss=-1.0), record(7, loss=-1.0), {**record(6), "resumed": True}, record(7, loss=-2.0)))
    assert values_of(store, "loss") == {**{step: float(step) for step in range(1, 6)}, 6: -1.0, 7: -2.0}


def test_steps_that_go_back_without_a_mark_are_put_in_order_and_the_last_value_counts():
    store = store_of(record(1, a=1.0), record(3, a=3.0), record(2, a=2.0), record(3, a=4.0))
    assert values_of(store, "a") == {1: 1.0, 2: 2.0, 3: 4.0}
    assert store.curve("a").values.tolist() == [1.0, 2.0, 4.0]


def test_steps_that_have_more_metrics_than_others_stay_in_order_without_being_drawn_anew():
    store = store_of(record(1, loss=1.0, norm=1.0))
    generation = store.generation
    for first in range(2, 100, 7):
        store.add_metrics(lines(*(record(step, loss=float(step), **({"norm": 1.0} if step % 3 == 0 else {}))
                                  for step in range(first, first + 7))))
        curve = store.curve("loss")
        assert curve.steps.tolist() == list(range(1, first + 7)) and curve.times.tolist() == [1000.0 + s for s in curve.steps]
    assert store.generation == generation
    assert store.series("norm")[0].tolist() == [1, *range(3, 100, 3)]
    assert store.pace() == 1.0


def test_a_run_with_names_at_random_is_read_too():
    store = store_of(*(record(step, **{f"n{step}": float(step), "loss": -float(step)}) for step in range(1, 400)))
    assert values_of(store, "loss") == {step: -float(step) for step in range(1, 400)}
    assert values_of(store, "n399") == {399: 399.0}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.0, 1.0, -2.0, 7.5, math.nan, math.inf, -math.inf])),
                max_size=60), st.sampled_from([1, 2, 8, 32]))
def test_drawn_points_are_measured_ones_with_every_extreme_and_the_first_gap_of_a_bucket(pairs, width):
    points = dict(pairs)
    steps = np.array(sorted(points), np.int64)
    values = np.array([points[step] for step in sorted(points)])
    starts = decimate.bucket_starts(steps, width)
    chosen = decimate.select(values, starts)
    assert (np.diff(chosen) > 0).all() if len(chosen) else not len(values)
    for bucket in set((steps // width).tolist()):
        inside = np.flatnonzero(steps // width == bucket)
        kept = set(chosen.tolist()) & set(inside.tolist())
        finite = inside[np.isfinite(values[inside])]
        if len(finite):
            assert min(values[finite]) in values[sorted(kept)] and max(values[finite]) in values[sorted(kept)]
        if len(finite) < len(inside):
            assert next(i for i in inside if not np.isfinite(values[i])) in kept
        assert len(kept) <= 3 + (len(values) - 1 in kept)
    assert not len(values) or len(values) - 1 in chosen


def test_spikes_and_nan_survive_and_the_points_are_few():
    values = np.random.default_rng(0).normal(0, 1, 100_000)
    values[54_321], values[77_777] = 1e6, math.nan
    store = Store()
    for first in range(0, 100_000, 20_000):
        store.add_metrics(lines(*({"step": i + 1, "time": float(i), "a": values[i] if math.isfinite(values[i]) else None}
                                  for i in range(first, first + 20_000))))
    curve = store.curve("a")
    assert 1000 <= len(curve.steps) <= 2 * decimate.BUCKETS + 2
    assert 54_322 in curve.steps and 77_778 in curve.steps[np.isnan(curve.values)]
    zoomed = store.curve("a", start=54_300, stop=54_350)
    assert zoomed.steps.tolist() == list(range(54_299, 54_352))  # every step, and one more on each side


def test_a_growing_curve_is_the_settled_points_and_what_follows():
    generator = np.random.default_rng(1)
    values = generator.normal(0, 1, 5000)
    values[generator.integers(0, 5000, 30)] = math.nan
    store, shown, curve = Store(), [], None
    for first in range(0, 5000, 37):
        store.add_metrics(lines(*({"step": i + 1, "time": float(i), "a": None if math.isnan(values[i]) else values[i]}
                                  for i in range(first, min(first + 37, 5000)))))
        if curve is None:
            curve = store.curve("a", width=16, smooth=9)
            shown = []
        else:
            curve = store.curve("a", width=16, smooth=9, row=curve.row)
        shown += list(zip(curve.steps.tolist(), curve.values.tolist(), curve.smooth.tolist()))
        whole = store.curve("a", width=16, smooth=9)
        np.testing.assert_allclose(shown, np.stack([whole.steps, whole.values, whole.smooth], 1), atol=1e-9)
        del shown[len(shown) - (len(curve.steps) - curve.settled):]


def test_smoothing_is_the_mean_of_the_steps_around():
    store = store_of(*(record(step, a=float(step)) for step in range(1, 8)), {**record(8, a=None)}, record(9, a=9.0))
    smooth = dict(zip(range(1, 10), store.curve("a", smooth=3).smooth.tolist()))
    assert [smooth[1], smooth[2], smooth[5], smooth[7]] == [1.5, 2.0, 5.0, 6.5]
    assert math.isnan(smooth[8]) and smooth[9] == 9.0  # NaN is a gap, and is in no mean
    part = store.curve("a", start=3, stop=4, smooth=5)  # steps beyond the range count, too
    assert dict(zip(part.steps.tolist(), part.smooth.tolist())) == {2: 2.5, 3: 3.0, 4: 4.0, 5: 5.0}
    sparse = store_of(*(record(step, a=float(step)) for step in range(100, 600, 100)))
    assert sparse.curve("a", smooth=50).smooth.tolist() == [100.0, 200.0, 300.0, 400.0, 500.0]  # the window is in steps


@pytest.mark.parametrize("width", [1, 4])
def test_means_for_the_heat_map_grow_with_the_run(width):
    store = Store()
    values = np.arange(1.0, 31.0)
    values[12] = math.nan
    for first in range(0, 30, 7):
        store.add_metrics(lines(*({"step": i + 1, "time": 0.0, "a": None if i == 12 else values[i]}
                                  for i in range(first, min(first + 7, 30)))))
        steps, means, bad, *measured = store.means("a", width=width)
        n = min(first + 7, 30)
        for step, mean, gap in zip(steps, means, bad):
            inside = [values[i] for i in range(n) if (i + 1) // width * width == step]
            assert gap == any(math.isnan(each) for each in inside)
            expected = [each for each in inside if not math.isnan(each)]
            assert (mean == pytest.approx(np.mean(expected))) if expected else math.isnan(mean)
        assert len(steps) == len({(i + 1) // width for i in range(n)})
        assert np.stack(measured, 1).tolist() == [[max(step, 1), min(step + width - 1, n)] for step in steps]


def test_alarms_begin_end_and_are_void_after_a_resume():
    def alarm(step, state, **more):
        return {"step": step, "time": 1.0, "alarm": "Spike", "state": state, "first_step": 5, "last_step": step, "steps": 1,
                "message": "high", "metric": "loss", "value": 2.0, "where": "", **more}

    store = Store()
    store.add_alarms(lines(alarm(5, "begin")))
    assert [(each.active, each.last_step, each.message) for each in store.alarms] == [(True, 5, "high")]
    store.add_alarms(lines(alarm(8, "end", message="")))
    assert [(each.active, each.last_step, each.message) for each in store.alarms] == [(False, 8, "high")]
    store.add_alarms(lines(alarm(9, "begin", first_step=9, value=None, nonfinite={"value": "nan"})) + b'{"step":1}\nbad\n')
    assert math.isnan(store.alarms[1].value) and store.skipped == 2
    store.add_alarms(lines({"step": 6, "time": 2.0, "resumed": True}))
    assert [(each.first_step, each.active) for each in store.alarms] == [(5, False)]


def test_texts_and_histograms_are_bounded_and_keep_both_ends():
    store = Store()
    store.add_texts(lines(*({"step": step, "time": 1.0, "name": "a", "text": "x"} for step in range(1, 1501))))
    assert len(store.texts) == 1000 and store.texts[-1]["step"] == 1500
    store.add_histograms(lines(*({"step": step, "time": 1.0, "histograms": {"g": {"low": 3, "counts": [1, 2]}}}
                                 for step in range(1, 2001))))
    kept = [step for step, _, _ in store.histograms("g")]
    assert len(kept) <= 512 and kept[0] == 1 and kept[-1] == 2000 and kept == sorted(kept)
    store.add_histograms(lines({"step": 2000, "time": 1.0, "histograms": {"g": {"low": 3, "counts": [7]}}}))
    assert [(step, counts.tolist()) for step, _, counts in store.histograms("g")][-2:] == [(kept[-2], [1, 2]), (2000, [7])]
    store.add_histograms(lines({"step": 100, "time": 2.0, "resumed": True}))
    assert max(step for step, _, _ in store.histograms("g")) <= 100


def test_restart_forgets_everything():
    store = store_of(record(1, a=1.0))
    generation = store.generation
    store.restart()
    assert store.names() == [] and store.generation > generation and store.span() is None


def test_after_one_huge_value_smoothing_is_what_it_was():
    steps, values = np.arange(1, 1001), 2 + 0.5 * np.sin(np.arange(1000) / 7)
    values[300] = 1e20
    smooth = decimate.centred_mean(steps, values, 51)
    assert smooth[400:] == pytest.approx(decimate.centred_mean(steps[326:], values[326:], 51)[74:], rel=1e-12)
    assert smooth[300] == pytest.approx(1e20 / 51)
    values[300] = 1e308
    assert np.isfinite(decimate.centred_mean(steps, values, 51)).all()


@given(arrays(np.float64, 12, elements=st.sampled_from([1.7976931348623157e308, 1e308, -1e308, 1.0, np.nan])))
def test_means_of_huge_values_are_finite(values):
    starts, steps, finite = np.array([0, 3, 9]), np.arange(12), np.isfinite(values)
    means, bad = decimate.bucket_means(values, starts)
    for mean, part in zip(means, np.split(values, starts[1:])):
        there = part[np.isfinite(part)]
        expected = float(sum(map(Fraction, there)) / len(there)) if len(there) else np.nan
        assert mean == pytest.approx(expected, nan_ok=True, rel=1e-12, abs=1e293)  # of 1e308, what is left of a difference
    assert (np.isfinite(decimate.centred_mean(steps, values, 5)) == finite).all()
    row = Means(starts, means, bad > 0, starts, starts)
    _, cells, _, ends, _ = maps.layer_cells({"a": row})
    assert np.isfinite([*ends, *(number for cell in cells for number in cell)]).all()


@given(st.data())
def test_smoothing_is_the_mean_of_the_window_wherever_steps_are(data):
    steps = np.cumsum(data.draw(arrays(np.int64, st.integers(1, 60), elements=st.integers(1, 9))))
    values = data.draw(arrays(np.float64, len(steps), elements=st.floats(-1e3, 1e3) | st.just(np.nan)))
    window = data.draw(st.integers(1, 40))
    expected = [np.nan] * len(steps)
    for i in np.flatnonzero(np.isfinite(values)):
        near = (steps >= steps[i] - window // 2) & (steps <= steps[i] + decimate.after(window)) & np.isfinite(values)
        expected[i] = values[near].mean()
    assert decimate.centred_mean(steps, values, window) == pytest.approx(expected, nan_ok=True, abs=1e-9)


def test_the_pace_is_that_since_the_resume():
    before = [record(step, loss=1.0) for step in range(1, 41)]
    mark = {"step": 30, "time": 50_000.0, "resumed": True}
    after = [{**record(step, loss=2.0), "time": 50_000.0 + 2 * (step - 30)} for step in range(31, 41)]
    live = store_of(*before)
    live.add_metrics(lines(mark, *after))
    for store in (live, store_of(*before, mark, *after)):
        assert store.pace() == pytest.approx(2.0)
        assert store.time_at(35) == 50_010.0 and store.step_at(50_009.0) == 35
        assert store.time_at(30) == 1030.0 and store.step_at(1030.5) == 31


@pytest.mark.parametrize("size", [1, 3, 100])
def test_where_the_clock_was_put_back_time_goes_on_however_the_lines_come(size):
    clock = [1000.0, 1010, 1020, 430, 440, 445, 455, 400, 410, 420]
    content = [record(step, loss=1.0) | {"time": at} for step, at in enumerate(clock, 1)]
    content[9:9] = [{"step": 9, "time": 420.0, "resumed": True}]
    store = Store()
    for first in range(0, len(content), size):
        store.add_metrics(lines(*content[first:first + size]))
    # The newest times are right; what was before is earlier.
    expected = [355.0, 365, 375, 375, 385, 390, 400, 400, 410, 420]
    assert store.series("loss")[1].tolist() == store.curve("loss").times.tolist() == expected
    assert (store.first_time, store.last_time, store.put_back) == (355.0, 420.0, 645.0)


def test_two_processes_that_make_one_run_have_clocks_of_their_own():
    store = Store()
    for source, ahead in ((0, 0.0), (1, 0.5), (0, 20.0), (1, 20.5)):  # in turn, as files are read
        store.add_metrics(lines(*(record(step, **{f"m{source}": 1.0}) | {"time": 1000.0 + ahead + step}
                                  for step in range(1 + int(ahead), 21 + int(ahead)))), source=source)
    assert store.put_back == 0.0 and store.series("m0")[1].tolist() == [1001.0 + i + (i >= 20) * 20 for i in range(40)]


def test_extremes_are_of_what_stayed():
    store = store_of(record(1, loss=1.0), record(2, loss=999.0), record(2, loss=1.5), record(3, loss=-5.0),
                     record(3, loss=2.0))
    latest = store.latest("loss")
    assert (latest.least, latest.largest) == (1.0, 2.0)


@pytest.mark.parametrize("pick", [".?" * 40 + "~", "(a*)*b", "(.*.*.*.*.*.*.*)*~", "(?:a|a)+" * 6 + "b"])
def test_an_expression_that_takes_long_is_given_up(pick):
    begin = time.monotonic()
    chart = catalog.picked(pick, ["a" * 5000 + "!"] * 3 + ["loss"], {})
    assert time.monotonic() - begin < 3 and not chart.names and chart.note


@pytest.mark.parametrize(("runs", "of_pick", "of_layers"), [(1, 12, 12), (2, 6, 3), (5, 2, 2), (8, 1, 1)])
def test_a_chart_has_twelve_curves_at_most_and_says_what_it_leaves_out(runs, of_pick, of_layers):
    names = ["loss", *(f"{kind}/{index}" for kind in ("learning_rate", "attention/entropy") for index in range(40))]
    found = {spec.id: spec for spec in catalog.charts(names, ["entropy"], runs=runs)}
    for id, most in (("rate", of_layers), ("entropy", of_layers), ("pick:entropy", of_pick)):
        assert len(found[id].names) == most and found[id].note == f"{most} of 40 metrics"
    assert not catalog.charts(names[:4], ["loss"], runs=runs)[0].note


def test_whether_a_map_is_logarithmic_is_plain():
    steps = np.array([1, 2])
    for mean in ([-1.0, 2.0], [1.0, 2.0], [1.0, 100.0]):
        *_, log = maps.layer_cells({"a": Means(steps, np.array(mean), np.zeros(2, bool), steps, steps)})
        assert type(log) is bool and log == (mean == [1.0, 100.0])


@pytest.mark.parametrize("pick", ["(?:b{1000}){4000}", "(?:(?:c{1000}){1000}){1000}", "a{1001}", "(?:(?:c{,99}){ 1, 99}){99}"])
def test_counts_that_would_fill_the_memory_are_refused(pick):
    assert "no regular expression: counts" in catalog.picked(pick, ["loss"], {}).note
    assert catalog.picked("lo{1,3}s{2}", ["loss"], {}).names == ("loss",)


def test_a_time_that_no_clock_shows_is_that_of_the_line_before():
    store = store_of(record(1, loss=1.0), {**record(2, loss=1.0), "time": 1e300}, {**record(3, loss=1.0), "time": -1e300},
                     record(4, loss=1.0))
    assert store.series("loss")[1].tolist() == [1001.0, 1001.0, 1001.0, 1004.0]


def test_of_many_alarms_the_first_ones_are_there_too():
    store = store_of(record(1, loss=1.0))
    store.add_alarms(lines(*({"step": step, "alarm": "A", "state": "begin", "first_step": step, "metric": "loss"}
                             for step in range(1, 91))))
    told = panels.alarms([SimpleNamespace(name="run", store=store)])
    assert [each["step"] for each in told] == [*range(90, 50, -1), *range(10, 0, -1)]


def test_an_alarm_that_was_open_when_training_ended_is_over_where_training_goes_on():
    store = Store()
    store.add_metrics(b'{"step": 5, "time": 1.0, "loss": 1.0}\n')
    line = b'{"step": 5, "time": 1.0, "alarm": "A", "state": "%s", "first_step": 3, "last_step": 5, "message": "m"}\n'
    store.add_alarms(line % b"begin" + line % b"open")
    assert [alarm.active for alarm in store.alarms] == [True]
    store.add_metrics(b'{"step": 6, "time": 2.0, "loss": 1.0}\n')
    assert [alarm.active for alarm in store.alarms] == [False]
    late = Store()  # read from the files as a whole: metrics first
    late.add_metrics(b'{"step": 6, "time": 2.0, "loss": 1.0}\n')
    late.add_alarms(line % b"begin" + line % b"open")
    assert [alarm.active for alarm in late.alarms] == [False]
