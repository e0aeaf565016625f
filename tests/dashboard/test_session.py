"""What one browser gets: everything once, in increments that add up to the whole."""
import json
import math
import os
import socket
import time
from dataclasses import replace

import orjson
import pytest
import runs_made

from instrument.dashboard import decimate
from instrument.dashboard.curves import of_axis
from instrument.dashboard.discovery import Directories
from instrument.dashboard.follow import Follower
from instrument.dashboard.session import Session, moved
from instrument.dashboard.view import LENGTH, MOST_CHANGES, MOST_PICKS, MOST_RUNS, View


class Browser:
    """Does with messages what static/live.js and static/plot.js do."""

    def __init__(self, session):
        self.session, self.charts, self.options, self.state, self.drawn = session, {}, {}, {}, 0

    def take(self):
        message = orjson.loads(orjson.dumps(self.session.message(), option=orjson.OPT_SERIALIZE_NUMPY))
        json.dumps(message, allow_nan=False)  # one NaN kills JSON.parse, and with it the page
        for id, chart in message.pop("charts", {}).items():
            if "kind" in chart:
                self.drawn += 1
                self.options[id] = chart["option"]
                self.charts[id] = {series["id"]: series["data"] for series in chart["option"]["series"]}
                continue
            for part in chart["series"]:
                points = self.charts[id][part["id"]]
                assert part["keep"] <= len(points)
                points[part["keep"]:] = part["add"]
            self.options[id]["xAxis"].update(chart["option"].get("xAxis", {}))
        self.state.update(message)
        return message

    def points(self, chart, series):
        return [(point[0], point[1]) for point in self.charts[chart][series]]


@pytest.fixture
def followed(tmp_path):
    """`followed(**view)`: a browser on the runs in `tmp_path`; `wait(condition)` gives new lines time to be read."""
    followers = []

    def start(**view):
        follower = Follower(Directories([tmp_path]))
        follower.start()
        followers.append(follower)
        browser = Browser(Session(follower, View(**view)))
        until(lambda: browser.take() and browser.state.get("layout"))
        return browser

    yield start
    for follower in followers:
        follower.close()


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def simple(steps, value=float):
    return [{"step": step, "time": 1e9 + step, "loss": value(step)} for step in steps]


def test_history_first_then_live_without_gap_or_duplicate(tmp_path, followed):
    made = runs_made.Made(tmp_path / "run")
    made.metrics(*simple(range(1, 300)))
    browser = followed()
    assert browser.points("loss", "line:0:loss") == [(step, float(step)) for step in range(1, 300)]
    drawn = browser.drawn
    for first in range(300, 700, 7):
        made.metrics(*simple(range(first, first + 7)))
        browser.take()
    until(lambda: browser.take() is not None and browser.points("loss", "line:0:loss")[-1][0] == 705)
    assert browser.points("loss", "line:0:loss") == [(step, float(step)) for step in range(1, 706)]
    assert browser.drawn == drawn  # by increments alone
    assert browser.options["loss"]["xAxis"]["max"] == 705


def test_nothing_new_is_no_message(tmp_path, followed):
    runs_made.healthy(tmp_path / "run", steps=60, layers=2).end("finished", 60)
    browser = followed()
    browser.take()
    assert browser.take() == {} and browser.session.message() == {}


def test_a_long_curve_stays_short_however_it_grows(tmp_path, followed):
    made = runs_made.Made(tmp_path / "run")
    made.metrics(*simple([1]))
    browser = followed()
    values = {step: math.nan if step == 3_333 else 1e6 if step == 7_777 else math.sin(step) for step in range(2, 12_001)}
    for first in range(2, 12_001, 500):
        last = min(first + 499, 12_000)
        made.metrics(*simple(range(first, last + 1), values.get))
        until(lambda last=last: browser.take() is not None and browser.points("loss", "line:0:loss")[-1][0] == last)
        assert len(browser.points("loss", "line:0:loss")) <= 2 * decimate.BUCKETS + 2
    points = browser.points("loss", "line:0:loss")
    assert (7_777, 1e6) in points and (3_333, None) in points and [3_333, None, "nan"] in browser.charts["loss"]["line:0:loss"]
    assert all(value is None or value == values.get(step, 1.0) for step, value in points)
    assert [step for step, _ in points] == sorted({step for step, _ in points})


def test_a_new_browser_has_what_the_old_one_has(tmp_path, followed):
    made = runs_made.Made(tmp_path / "run")
    made.metrics(*simple(range(1, 2000)))
    browser = followed(smooth=10)
    made.metrics(*simple(range(2000, 2500)))
    until(lambda: browser.take() is not None and browser.points("loss", "line:0:loss")[-1][0] == 2499)
    fresh = Browser(Session(browser.session.follower, browser.session.view))
    fresh.take()
    for series in ("line:0:loss", "smooth:0:loss"):
        assert browser.points("loss", series) == [pytest.approx(each) for each in fresh.points("loss", series)]


def test_a_resumed_run_is_drawn_anew(tmp_path, followed):
    made = runs_made.Made(tmp_path / "run")
    made.metrics(*simple(range(1, 101)))
    browser = followed()
    made.resumed(60)
    made.metrics(*simple(range(61, 81), lambda step: -1.0))
    until(lambda: browser.take() is not None and browser.points("loss", "line:0:loss")[-1] == (80, -1.0))
    assert browser.points("loss", "line:0:loss") == [(step, float(step) if step <= 60 else -1.0) for step in range(1, 81)]


def test_zoom_shows_every_step_and_one_more_on_each_side(tmp_path, followed):
    made = runs_made.Made(tmp_path / "run")
    made.metrics(*simple(range(1, 9001)))
    browser = followed()
    assert browser.points("loss", "line:0:loss")[1][0] > 2
    browser.session.view = browser.session.view.zoomed(4000, 4100)
    browser.take()
    assert browser.points("loss", "line:0:loss") == [(step, float(step)) for step in range(3999, 4102)]
    assert (browser.options["loss"]["xAxis"]["min"], browser.options["loss"]["xAxis"]["max"]) == (4000, 4100)
    assert browser.state["address"] == "?from=4000&to=4100"


def test_a_window_moves_with_the_run_by_increments(tmp_path, followed):
    made = runs_made.Made(tmp_path / "run")
    made.metrics(*simple(range(1, 1001)))
    browser = followed(window=100)
    drawn = browser.drawn
    for step in range(1001, 1040):
        made.metrics(*simple([step]))
    until(lambda: browser.take() is not None and browser.options["loss"]["xAxis"]["max"] == 1039)
    assert browser.options["loss"]["xAxis"]["min"] == 939 and browser.drawn == drawn
    points = dict(browser.points("loss", "line:0:loss"))
    assert set(range(939, 1040)) <= set(points) and len(points) < 260


def test_what_is_not_on_the_screen_is_not_sent(tmp_path, followed):
    runs_made.healthy(tmp_path / "run", steps=60, layers=2)
    follower = followed().session.follower
    session = Session(follower, View())
    session.visible = {"rate"}
    assert set(session.message()["charts"]) == {"rate"}
    session.visible = {"rate", "loss", "table"}
    later = session.message()
    assert set(later["charts"]) == {"loss"} and later["table"]["rows"][0]["name"] == "loss"


@pytest.mark.parametrize("odd", [{"command": 5}, {"pid": 2 ** 63 - 1}, {"total_steps": 10 ** 9}, {"versions": 3},
                                 {"hyper_parameters": [1]}, {"schema": {"name": 1}}, {"resumes": [7]}], ids=str)
def test_an_odd_run_does_not_take_another_along(tmp_path, followed, odd):
    for name in ("good", "odd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(b"{}")
        lines = b"".join(orjson.dumps(line) + b"\n" for line in simple([1, 2, 3]))
        (tmp_path / name / "metrics-00000.jsonl").write_bytes(lines)
    config = {"host": socket.gethostname(), "pid": 1, **odd}
    (tmp_path / "odd" / "config.json").write_bytes(orjson.dumps(config))
    line = {"alarm": "A", "first_step": 1e300, "state": "begin", "step": 1, "time": 1e308}
    (tmp_path / "odd" / "alarms.jsonl").write_bytes(orjson.dumps(line) + b"\n")
    with open(tmp_path / "odd" / "metrics-00000.jsonl", "ab") as file:
        file.write(orjson.dumps({"step": 4, "time": 1e308, "loss": 1.0}) + b"\n")
    browser = followed(runs=("good", "odd"))
    until(lambda: browser.take() is not None and "loss" in browser.charts and len(browser.points("loss", "line:0:loss")) == 3)
    assert {head["name"] for head in browser.state["runs"]} == {"good", "odd"}


def test_a_run_keeps_its_name_whatever_other_runs_come(tmp_path):
    roots = [tmp_path / "a" / "runs", tmp_path / "b" / "runs"]
    for root in roots:
        root.mkdir(parents=True)
    runs_made.Made(roots[1] / "x").metrics(*simple([1]))
    directories = Directories(roots)
    assert directories.find() == {"b/runs/x": roots[1] / "x"}
    runs_made.Made(roots[0] / "x").metrics(*simple([1]))
    assert directories.find() == {"a/runs/x": roots[0] / "x", "b/runs/x": roots[1] / "x"}


def test_several_runs_are_told_apart_by_their_hyper_parameters(tmp_path, followed):
    for name, rate in (("a", 1e-3), ("b", 2e-3)):
        runs_made.healthy(tmp_path / name, steps=60, layers=2, rate=rate)
    browser = followed(runs=("a", "b"))
    until(lambda: browser.take() is not None and "line:1:loss" in browser.charts.get("loss", ()))
    assert [run["differs"] for run in browser.state["runs"]] == ["learning_rate=0.001", "learning_rate=0.002"]
    of_one = {each["id"]: each["note"] for each in browser.state["layout"] if each["section"] in ("Layers", "Histograms")}
    assert set(of_one) >= {"heat", "profile"} and set(of_one.values()) == {"of a"}
    browser.session.forget()
    legend = browser.session.message()["charts"]["loss"]["extra"]["legend"]
    assert [entry["label"] for entry in legend] == ["a (learning_rate=0.001)", "b (learning_rate=0.002)", "loss", "val/loss"]
    assert set(browser.charts["loss"]) >= {"line:0:loss", "line:1:loss", "line:0:val/loss"}


def test_alarms_are_in_the_header_and_on_the_curves(tmp_path, followed):
    runs_made.exploding(tmp_path / "run", layers=4)
    browser = followed()
    assert browser.state["runs"][0]["state"] == "failed" and browser.state["runs"][0]["loss"] == "nan"
    alarms = browser.state["alarms"]
    assert [(alarm["alarm"], alarm["step"], alarm["where"], alarm["active"]) for alarm in alarms] == [
        ("NonFinite", 360, "blocks.2", True), ("GradientSpike", 329, "", False)]
    marks = next(series for series in browser.options["grad"]["series"] if series["id"] == "marks")
    assert [mark["xAxis"] for mark in marks["markLine"]["data"] if "xAxis" in mark] == [329]
    assert [[end["xAxis"] for end in area] for area in marks["markArea"]["data"]] == [[329, 340]]
    heat = browser.options["heat"]["series"]
    assert {cell[1] for cell in heat[1]["data"]} == {2, 3}  # the layers that are not finite, and in no other colour
    assert not {tuple(cell[:2]) for cell in heat[0]["data"]} & {tuple(cell[:2]) for cell in heat[1]["data"]}


@pytest.mark.parametrize("x", ["time", "clock"])
def test_the_x_axis_may_be_time(tmp_path, followed, x):
    made = runs_made.Made(tmp_path / "run")
    made.metrics(*({"step": step, "time": 1e9 + 10 * step, "loss": 1.0} for step in range(1, 11)))
    browser = followed(x=x)
    expected = [10 * i for i in range(10)] if x == "time" else [(1e9 + 10 + 10 * i) * 1000 for i in range(10)]
    assert [point[0] for point in browser.points("loss", "line:0:loss")] == expected
    browser.session.view = browser.session.view.zoomed(*(of_axis(x, browser.session.view) for x in (expected[4], expected[6])))
    browser.take()
    assert [point[0] for point in browser.points("loss", "line:0:loss")] == expected[3:8]  # and one more on each side
    assert browser.options["loss"]["xAxis"]["min"] == expected[4] and browser.options["loss"]["xAxis"]["max"] == expected[6]


@pytest.mark.parametrize("x", ["time", "clock"])
def test_where_the_clock_was_put_back_no_curve_folds_back(tmp_path, followed, x):
    made = runs_made.Made(tmp_path / "run")
    made.metrics(*({"step": step, "time": 1e9 + step, "loss": 1.0} for step in range(1, 11)))
    browser = followed(x=x)
    made.metrics(*({"step": step, "time": 1e9 + step - 3600, "loss": 1.0} for step in range(11, 16)))
    until(lambda: browser.take() is not None and len(browser.points("loss", "line:0:loss")) == 15)
    seconds = [*range(1, 11), *range(10, 15)]
    expected = [each - 1 for each in seconds] if x == "time" else [(1e9 + 1 + each - 3600) * 1000 for each in seconds]
    assert [each for each, _ in browser.points("loss", "line:0:loss")] == expected
    fresh = Browser(Session(browser.session.follower, browser.session.view))
    fresh.take()
    assert fresh.charts["loss"] == browser.charts["loss"]


def test_time_begins_with_the_run_whichever_of_its_files_are_there(tmp_path, followed):
    made = runs_made.Made(tmp_path / "run", start_time="2001-09-09T01:46:40+00:00")  # 1e9
    made.number = 7
    made.metrics(*({"step": step, "time": 1e9 + step, "loss": 1.0} for step in range(500, 505)))
    browser = followed(x="time")
    assert [each for each, _ in browser.points("loss", "line:0:loss")] == [500, 501, 502, 503, 504]


def zoomed_in(browser, low, high):
    browser.session.view = browser.session.view.zoomed(*(of_axis(x, browser.session.view) for x in (low, high)))
    browser.take()
    axis = browser.options["loss"]["xAxis"]
    return [axis["min"], axis["max"]], [{step for step, _ in browser.points("loss", f"line:{run}:loss")
                                         if axis["min"] <= step <= axis["max"]} for run in range(2)]


def test_zoom_on_an_axis_of_time_is_right_for_every_run(tmp_path, followed):
    for name, start, pace in (("slow", 1e9, 1), ("fast", 1e9 + 5000, 0.125)):
        runs_made.Made(tmp_path / name).metrics(*({"step": step, "time": start + pace * step, "loss": 1.0}
                                                  for step in range(801)))
    browser = followed(runs=("slow", "fast"), x="clock")
    until(lambda: browser.take() is not None and "line:1:loss" in browser.charts.get("loss", ()))
    # Where the first run has nothing.
    ends, (slow, fast) = zoomed_in(browser, (1e9 + 5010) * 1e3, (1e9 + 5020) * 1e3)
    assert ends == [(1e9 + 5010) * 1e3, (1e9 + 5020) * 1e3] and slow == set() and len(fast) == 81
    address = browser.session.view.query()
    assert View.of_query(address) == browser.session.view
    fresh = Browser(Session(browser.session.follower, View.of_query(address)))
    fresh.take()
    assert fresh.charts["loss"] == browser.charts["loss"]  # a link shows the same
    browser.session.view = View(runs=("slow", "fast"), x="time")
    browser.take()
    ends, (slow, fast) = zoomed_in(browser, 50, 200)
    assert ends == [50, 200] and slow == set(range(50, 201)) and len(fast) == 401 and max(fast) == 100
    # A range that goes on after the newest step does not move, and grows by increments.
    drawn, made = browser.drawn, runs_made.Made(tmp_path / "fast")
    for step in range(801, 900):
        made.metrics({"step": step, "time": 1e9 + 5000 + 0.125 * step, "loss": 1.0})
    until(lambda: browser.take() is not None and browser.points("loss", "line:1:loss")[-1][0] == 0.125 * 899)
    assert browser.drawn == drawn and browser.options["loss"]["xAxis"]["max"] == 200
    # On the axis of steps it is the range of the first run.
    browser.session.view = replace(browser.session.view, x="step")
    browser.take()
    assert (browser.options["loss"]["xAxis"]["min"], browser.options["loss"]["xAxis"]["max"]) == (50, 200)
    browser.session.view = replace(browser.session.view, x="clock")
    browser.take()
    assert browser.options["loss"]["xAxis"]["min"] == (1e9 + 50) * 1e3


@pytest.mark.parametrize(("layers", "note"), [(200, ""), (300, "200 of 300 layers")])
def test_maps_say_what_they_leave_out(tmp_path, followed, layers, note):
    made = runs_made.Made(tmp_path / "run")
    made.metrics({"step": 1, "time": 1e9, "loss": 1.0, **{f"grad/norm/blocks.{layer}": 1.0 for layer in range(layers)}})
    browser = followed()
    cards = {card["id"]: card for card in browser.state["layout"]}
    assert cards["heat"]["note"] == cards["profile"]["note"] == note
    assert len(browser.options["heat"]["yAxis"]["data"]) == 200


def test_maps_name_the_steps_that_were_measured(tmp_path, followed):
    made = runs_made.Made(tmp_path / "run")
    made.metrics(*({"step": step, "time": 1e9, "loss": 1.0, **({"grad/norm/a": float(step), "grad/norm/b": 2.0}
                                                               if step % 100 == 0 else {})} for step in range(1, 2050)))
    browser = followed(runs=("run",))

    def caption(step):
        browser.session.view = replace(browser.session.view, at=step)
        browser.session.forget()
        return browser.session.message()["charts"]["profile"]["extra"]["caption"]

    heat = browser.session.forget() or browser.session.message()["charts"]["heat"]
    assert heat["extra"]["steps"] == [(step, step) for step in range(100, 2050, 100)]  # each alone in its bucket of 16
    assert heat["option"]["xAxis"]["data"] == list(range(100, 2050, 100))
    assert [caption(step) for step in (99, 100, 199, None)] == [
        "grad/norm not measured by step 99", "grad/norm at step 100", "grad/norm at step 100", "grad/norm at step 2,000"]
    made.metrics({"step": 2050, "time": 1e9, "grad/norm/b": 3.0})
    until(lambda: caption(None) == "grad/norm at steps 2,000 to 2,050")


def test_states_of_a_run(tmp_path):
    follower = Follower(Directories([tmp_path]))
    made = runs_made.Made(tmp_path / "run")
    follower.found = follower.directories.find()
    run = follower.run("run")
    until(lambda: run.progress is None)
    assert run.state()[0] == "waiting"
    now = time.time()
    made.metrics({"step": 1, "time": now - 1, "loss": 1.0}, {"step": 2, "time": now, "loss": 1.0})
    run.poll()
    assert run.state(now + 30) == ("running", "running")
    state, text = run.state(now + 300)
    assert state == "stalled" and time.strftime("%H:%M:%S", time.localtime(now)) in text
    made.metrics({"step": 3, "time": now - 900, "loss": 1.0})  # its clock was put back, or another host's clock differs
    run.poll()
    assert run.state(now + 30) == ("running", "running") and run.state(now + 300)[0] == "stalled"
    made.end("failed: ValueError: x", 2)
    run.poll()
    assert run.state(now + 300) == ("failed", "failed: ValueError: x")
    made.metrics({"step": 3, "time": now + 400, "loss": 1.0})  # it goes on
    run.poll()
    assert run.state(now + 401)[0] == "running"
    made.end("finished", 3)
    run.poll()
    assert run._ended_at > 0 and run.state(now + 390)[0] in ("running", "ended")
    follower.close()


def test_a_run_whose_process_is_gone_says_so(tmp_path):
    import socket
    import subprocess
    import sys
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    made = runs_made.Made(tmp_path / "run", host=socket.gethostname(), pid=ended.pid)
    made.metrics({"step": 1, "time": time.time() - 10, "loss": 1.0})
    follower = Follower(Directories([tmp_path]))
    run = follower.run("run")
    until(lambda: run.progress is None)
    assert run.state()[0] == "failed" and "process is gone" in run.state()[1]
    follower.close()


def test_a_long_history_is_read_by_processes_and_then_followed(tmp_path, monkeypatch, followed):
    monkeypatch.setattr("instrument.dashboard.run._LONG", 10_000)
    monkeypatch.setattr("instrument.dashboard.run._PIECE", 20_000)
    made = runs_made.Made(tmp_path / "run")
    made.metrics(*simple(range(1, 1001)))
    made.number = 1
    made.metrics(*simple(range(1001, 3001)))
    with open(tmp_path / "run" / "metrics-00001.jsonl", "ab") as file:
        file.write(b'{"step":3001,"time":1.0,')  # being written
    browser = followed(window=0)
    until(lambda: browser.take() is not None and "loss" in browser.charts, 30)
    store = browser.session.runs()[0].store
    assert store.series("loss")[0].tolist() == list(range(1, 3001)) and store.skipped == 0
    with open(tmp_path / "run" / "metrics-00001.jsonl", "ab") as file:
        file.write(b'"loss":3001.0}\n')
    until(lambda: store.last_step == 3001)
    assert store.series("loss")[0].tolist() == list(range(1, 3002))


def test_where_a_point_stands_for_many_steps_there_is_their_mean_too(tmp_path, followed):
    made = runs_made.Made(tmp_path / "run")
    made.metrics(*({"step": step, "time": 1e9 + step, "loss": float(step), "learning_rate": 1e-3, "grad/norm": 1.0}
                   for step in range(1, 9001)))
    browser = followed()
    smooth = dict(browser.points("loss", "smooth:0:loss"))  # of 563 buckets of 16 steps
    assert smooth[8000] == 7999.5 and smooth[9000] == 8968  # the last one of half as many steps
    assert "smooth:0:learning_rate" not in browser.charts["rate"]
    browser.session.view = browser.session.view.zoomed(4000, 5000)
    browser.take()
    assert "smooth:0:loss" not in browser.charts["loss"]
    browser.session.view = View(smooth=0)
    browser.take()
    assert "smooth:0:loss" not in browser.charts["loss"] and len(browser.charts["loss"]["line:0:loss"]) > 1000


@pytest.mark.parametrize(("norms", "expected"), [((0.75,), [0.75]), ((None,), []), ((0.75, 0.75), [0.75]), ((0.75, 1.0), []),
                                                 ((True,), []), ((-1,), []), (("1",), []), (([1],), [])], ids=str)
def test_the_clipping_threshold_is_the_one_that_is_recorded(tmp_path, followed, norms, expected):
    names = [f"run{index}" for index in range(len(norms))]
    for name, norm in zip(names, norms):
        made = runs_made.Made(tmp_path / name, max_grad_norm=norm)
        made.metrics({"step": 1, "time": 1e9, "grad/norm": 3.0, "grad/norm_clipped": 0.5})
    browser = followed(runs=tuple(names))
    until(lambda: browser.take() is not None and f"line:{len(names) - 1}:grad/norm" in browser.charts.get("grad", ()))
    assert [each["yAxis"] for each in marks_of(browser, "grad") if "yAxis" in each] == expected


def marks_of(browser, chart):
    return next(series for series in browser.options[chart]["series"] if series["id"] == "marks")["markLine"]["data"]


def test_the_loss_of_a_pipeline_is_that_of_its_last_stage(tmp_path, followed):
    first = runs_made.Made(tmp_path / "run", rank=0, stage=0, stages=2)
    last = runs_made.Made(tmp_path / "run" / "rank_3", rank=3, stage=1, stages=2)
    for step in range(1, 6):
        first.metrics({"step": step, "time": 1e9 + step, "loss": 777.0, "val/loss": 777.0, "learning_rate": 1e-3})
        last.metrics({"step": step, "time": 1e9 + step, "loss": float(step), "learning_rate": 9.0})
    browser = followed(runs=("run",))
    until(lambda: browser.take() is not None and browser.charts.get("loss", {}).get("line:0:loss"))
    assert browser.points("loss", "line:0:loss") == [(step, float(step)) for step in range(1, 6)]
    assert "line:0:val/loss" not in browser.charts["loss"]
    assert {value for _, value in browser.points("rate", "line:0:learning_rate")} == {1e-3}
    # Both go on after a resume; what one has read already is not lost with the other's mark.
    last.resumed(3)
    last.metrics({"step": 4, "time": 2e9, "loss": -4.0})
    until(lambda: browser.take() is not None and browser.points("loss", "line:0:loss")[-1] == (4, -4.0))
    first.resumed(3)
    first.metrics({"step": 4, "time": 2e9, "loss": 777.0, "learning_rate": 2e-3})
    until(lambda: browser.take() is not None and browser.points("rate", "line:0:learning_rate")[-1] == (4, 2e-3))
    assert browser.points("loss", "line:0:loss")[-2:] == [(3, 3.0), (4, -4.0)]


def test_a_run_that_becomes_a_link_is_not_followed(tmp_path):
    made = runs_made.Made(tmp_path / "runs" / "run")
    made.metrics(*simple([1]))
    secret = runs_made.Made(tmp_path / "secret")
    secret.metrics(*simple([1, 2]))
    follower = Follower(Directories([tmp_path / "runs"]))
    run = follower.run("run")
    until(lambda: run.progress is None)
    assert run.store.last_step == 1
    (tmp_path / "runs" / "run").rename(tmp_path / "moved")
    (tmp_path / "runs" / "run").symlink_to(tmp_path / "secret")
    run.poll()
    assert run.store.last_step == 1 and "link" in run.error
    follower.close()


def test_what_one_hides_enlarges_and_filters_is_in_the_address(tmp_path, followed):
    runs_made.healthy(tmp_path / "run", steps=60, layers=2)
    browser = followed()
    view = moved(moved(moved(View(), "hide", "loss|val/loss"), "large", "grad"), "filter", "norm")
    assert view.query() == "?hide=loss%7Cval/loss&large=grad&filter=norm" and View.of_query(view.query()) == view
    browser.session.view = view
    browser.session.forget()
    browser.take()
    cards = {card["id"]: card for card in browser.state["layout"]}
    assert cards["loss"]["hidden"] == ["val/loss"] and cards["grad"]["hidden"] == []
    assert [id for id, card in cards.items() if card["large"]] == ["grad"]
    assert {row["name"] for row in browser.state["table"]["rows"]} >= {"grad/norm", "weight/norm"}
    assert all("norm" in row["name"] for row in browser.state["table"]["rows"])
    assert moved(view, "hide", "loss|val/loss").hidden == ()


def test_an_address_keeps_all_that_a_view_may_have():
    long = "é" * LENGTH
    view = View(runs=tuple(f"run{i}" for i in range(MOST_RUNS)), picks=tuple(f"{i:02}{long[2:]}" for i in range(MOST_PICKS)),
                scales=tuple(f"a{i}" for i in range(MOST_CHANGES)), hidden=tuple(f"b{i}" for i in range(MOST_CHANGES)),
                first=3, last=9, smooth=7, heat=long, at=5, histogram=long, text=long, large=long, filter=long, theme="dark")
    assert View.of_query(view.query()) == view


def test_without_a_choice_the_run_that_began_last_is_shown_and_stays(tmp_path, followed):
    first, second = (runs_made.Made(tmp_path / name) for name in ("b", "a"))
    runs_made.Made(tmp_path / "b" / "rank_1").metrics(*simple([1]))
    for made in (first, second):
        made.metrics(*simple([1]))
    os.utime(tmp_path / "a" / "config.json", (1e9, 1e9))
    browser = followed()
    assert [run["name"] for run in browser.state["runs"]] == ["b"]
    second.metrics(*simple([2]))  # both train
    follower = browser.session.follower
    time.sleep(0.01)
    follower.found = follower.directories.find()
    assert [run["name"] for run in browser.session.message().get("runs", browser.state["runs"])] == ["b"]
    os.utime(tmp_path / "a" / "config.json", (4e9, 4e9))  # begins anew
    follower.found = follower.directories.find()
    assert browser.session.message()["runs"][0]["name"] == "a"
