"""The console: what panel and lines say, alarms once, and prints of another thread."""
import io
import math
import os
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hostile import BEGUN, ENDED
from instrument.record import Incident, Record, RunInfo
from instrument.writers import ConsoleWriter
from instrument.writers.console_parts import OpenIncidents, Pace, Trend, figures, said, short, validation
from instrument.writers.terminal import Screen


def test_what_a_file_says_moves_no_cursor():
    incident = Incident("Bad\x1b[2J", "begin", 3, 3, 1, "NaN\x1b]0;title\x07", where="layer\x9b31m")
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", said(incident)) and "title" in said(incident)
    values = {"val/\x1b]0;a\x07": 1.0, "activation/rms/\x1b[2Jb": 2.0}
    assert "\x1b" not in repr(validation(values)) + repr(figures(values)).replace("\\x1b", "\x1b")
    assert "\\x1b" not in repr(validation(values))


def log(width=100):
    return Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)


def terminal(width=110, color=None):
    return Console(file=io.StringIO(), width=width, height=30, force_terminal=True, color_system=color, legacy_windows=False)


def lines(console):
    return console.file.getvalue().splitlines()


def panel(console):
    """The last panel that was drawn."""
    return console.file.getvalue().rpartition("╭")[2]


def record(step, **values):
    return Record(step, 100.0 + step, {"loss": 1.0, "grad/norm": 0.5, "learning_rate": 1e-3, **values})


def alarm(step, *incidents, **values):
    return replace(record(step, **values), alarms=incidents)


# What the run says

def test_the_run_says_how_many_steps_and_its_name():
    console = terminal()
    with ConsoleWriter(console=console) as writer:
        writer.start(RunInfo("exp1", Path("/runs/exp1"), total_steps=200))
        writer.write(record(10))
    assert " exp1 " in panel(console) and "step  10/200" in panel(console)


def test_steps_that_were_given_stay():
    console = log()
    with ConsoleWriter(total_steps=50, console=console) as writer:
        writer.start(RunInfo(total_steps=200))
        writer.write(record(10))
    assert lines(console)[0].startswith("step 10/50")


def test_a_run_without_directory_and_end_has_neither_title_nor_bar():
    console = terminal()
    with ConsoleWriter(console=console) as writer:
        writer.start(RunInfo())
        writer.write(record(10))
    assert panel(console).startswith("─────") and "step 10 " in panel(console) and "━" not in panel(console)


# Throughput, waiting, validation

RATES = {"tokens_per_second": 12345.0, "samples_per_second": 96.4, "data_wait_fraction": 0.031}


@pytest.mark.parametrize("width", [60, 80, 110, 160])
def test_throughput_and_waiting_are_shown_where_they_are_measured(width):
    with_rates, without = terminal(width), terminal(width)
    for console, values in ((with_rates, RATES), (without, {})):
        with ConsoleWriter(total_steps=100, console=console) as writer:
            writer.write(record(10, **values))
    assert "12.3k tokens/s  96.4 samples/s  3 % waiting for data" in panel(with_rates)
    assert "/s " not in panel(without) and "waiting" not in panel(without)
    assert {len(line) for line in panel(with_rates).splitlines()[1:-1]} == {width}


def test_a_line_of_a_log_has_them_too():
    console = log()
    with ConsoleWriter(console=console) as writer:
        writer.write(record(10, **RATES))
    assert lines(console) == ["step 10  loss 1.0000  gradient norm 0.5000  learning rate 1.00e-03  largest rms -  "
                              "12.3k tokens/s  96.4 samples/s  3 % waiting for data"]


def test_much_waiting_is_yellow():
    colored = []
    for share in (0.1, 0.4):
        console = terminal(color="truecolor")
        with ConsoleWriter(console=console) as writer:
            writer.write(record(10, data_wait_fraction=share))
        colored.append("\x1b[33m" in panel(console))
    assert colored == [False, True]


@pytest.mark.parametrize("width", [60, 110])
def test_validation_is_a_line_of_its_own_and_hides_nothing(width):
    console = terminal(width)
    with ConsoleWriter(total_steps=100, console=console) as writer:
        writer.write(record(10))
        writer.write(Record(10, 110.5, {"val/loss": 0.25, "val/accuracy": math.nan}))
        writer.write(record(11, loss=3.0))
    assert "validation at step 10    loss 0.2500   accuracy nan" in panel(console)
    assert "3.0000" in panel(console) and "0.5000" in panel(console)


def test_validation_is_a_line_of_a_log_at_once():
    console = log()
    with ConsoleWriter(line_every=100, console=console) as writer:
        writer.write(record(1))
        writer.write(Record(1, 101.5, {"val/loss": 0.25, "val/accuracy": 0.5}))
    assert lines(console)[1:] == ["step 1  validation  loss 0.2500  accuracy 0.5000"]


def test_what_is_not_finite_is_red_and_what_is_finite_is_not():
    colored = []
    for value in (1.0, math.nan, -math.inf):
        console = terminal(color="truecolor")
        with ConsoleWriter(console=console) as writer:
            writer.write(record(1, loss=value))
        colored.append(f"\x1b[1;31m{value:.4f}"[:8] in panel(console))
    assert colored == [False, True, True]


def test_a_long_name_of_a_block_shows_its_end():
    console = terminal(80)
    with ConsoleWriter(console=console) as writer:
        writer.write(record(1, **{"activation/rms/" + "backbone." * 12 + "blocks.31": 2.0}))
    assert "…" in panel(console) and "backbone.blocks.31 " in panel(console)


# Alarms

def test_a_log_gets_an_incident_when_it_begins_and_when_it_ends():
    console = log(width=40)  # lines of a log are not broken
    with ConsoleWriter(line_every=100, console=console) as writer:
        writer.write(record(1))
        writer.write(alarm(7, BEGUN))
        writer.write(record(8))
        writer.write(alarm(10, ENDED))
    assert [line for line in lines(console) if "NonFinite" in line] == [
        "NonFinite at step 7: loss is nan (blocks.1.dense)",
        "NonFinite ended: it was seen in 3 recorded steps, from step 7 to step 9 (blocks.1.dense)"]


def test_a_terminal_gets_it_above_the_panel_which_marks_it_until_it_ends():
    console = terminal(color="truecolor")
    writer = ConsoleWriter(console=console)
    writer.write(record(1))
    assert "NonFinite" not in console.file.getvalue()
    writer.write(alarm(7, BEGUN))
    sentence = "\x1b[1;31mNonFinite at step 7: loss is nan (blocks.1.dense)"
    assert console.file.getvalue().count(sentence) == 2  # above the panel, and in it
    assert sentence in panel(console) and "\x1b[31m╭" in console.file.getvalue()
    writer.write(record(9))
    assert sentence in panel(console)
    writer.write(alarm(10, ENDED))
    assert "NonFinite" not in panel(console) and console.file.getvalue().count("NonFinite ended") == 1
    writer.close()


def test_an_incident_does_not_wait_until_the_panel_is_due():
    console = terminal()
    writer = ConsoleWriter(console=console)
    writer.write(record(1))
    writer.write(replace(alarm(2, BEGUN), time=101.0))  # no time has passed since the panel was drawn
    assert "NonFinite" in panel(console)
    writer.close()


def test_many_open_incidents_take_few_lines():
    console = terminal()
    with ConsoleWriter(console=console) as writer:
        writer.write(alarm(7, *(replace(BEGUN, where=f"blocks.{place}") for place in range(9))))
        writer.flush()
        assert panel(console).count("NonFinite") == 3 and "and 6 more" in panel(console)


def test_an_alarm_without_numbers_is_told_too():
    for console in (log(), terminal()):
        with ConsoleWriter(console=console) as writer:
            writer.write(Record(5, 0.0, {}, {}, {}, (BEGUN,)))
        assert "NonFinite at step 7" in console.file.getvalue()


def test_incidents_of_one_alarm_end_one_by_one():
    opened = OpenIncidents()
    first, second = replace(BEGUN, where="a"), replace(BEGUN, where="b")
    for incident in (first, second, replace(second, state="end")):
        opened.take(incident)
    assert list(opened) == [first]
    opened.take(replace(first, state="end", where=""))  # the end names no layer
    opened.take(Incident("Unknown", "end", 1, 1, 1, ""))
    assert len(opened) == 0


# Time

def test_the_pace_of_a_data_sink_is_over_its_bursts():
    pace = Pace()
    for burst in range(4):
        for step in range(100):
            pace.add(burst * 100 + step + 1, 50.0 * burst + step * 1e-5)
    assert pace.seconds() == pytest.approx(0.5, rel=0.01)


def test_the_pace_of_fast_steps_is_over_several_seconds():
    pace = Pace()
    for step in range(1, 20_001):
        pace.add(step, step * 1e-3 + (0.0005 if step % 2 else 0.0))
    assert pace.seconds() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("steps, times", [([5], [1.0]), ([5, 6], [1.0, 1.0]), ([5, 1], [1.0, 9.0]), ([5, 6], [9.0, 1.0]),
                                          ([5, 5], [1.0, 9.0])])
def test_no_pace_is_told_where_none_is_known(steps, times):
    pace = Pace()
    for step, time in zip(steps, times):
        pace.add(step, time)
    assert pace.seconds() is None


def test_steps_that_are_counted_anew_are_shown():
    console = log()
    with ConsoleWriter(line_every=10, console=console) as writer:
        for step in (500, 1, 2, 11):
            writer.write(record(step))
    assert [line.split()[1] for line in lines(console)] == ["500", "1", "11"]


def test_a_clock_that_is_set_back_does_not_stop_the_panel():
    console = terminal()
    writer = ConsoleWriter(console=console)
    for step, time in ((1, 1000.0), (2, 10.0), (3, 11.0)):
        writer.write(Record(step, time, {"loss": float(step)}))
        assert f"{step}.0000" in panel(console)
    writer.close()


# Small things

def test_a_trend_of_the_largest_numbers_is_a_trend():
    trend = Trend(None)
    for step, value in enumerate((-1.7e308, 0.0, math.nan, 1.7e308)):
        trend.add(step, value)
    assert trend.text() == "▁▅█" and trend.text(ascii_only=True) == "_+@"


@pytest.mark.parametrize("value, text", [(0.0, "0.00"), (9.999, "10.0"), (99.99, "100"), (999.6, "1.00k"), (1e6, "1.00M"),
                                         (2.5e12, "2500G"), (math.nan, "nan"), (math.inf, "inf")])
def test_a_rate_has_three_digits(value, text):
    assert short(value) == text


def test_a_terminal_without_unicode_gets_ascii():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=110, force_terminal=True, color_system=None, legacy_windows=False)
    with ConsoleWriter(total_steps=10, console=console) as writer:
        for step in range(1, 9):
            writer.write(record(step))
    file.flush()
    assert b"step  8/10" in file.buffer.getvalue()


# Prints of another thread

def test_prints_of_the_program_appear_above_the_panel_and_streams_are_given_back(monkeypatch):
    console = terminal()
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    writer = ConsoleWriter(console=console)
    writer.write(record(1))
    assert print("from the script") is None and print("an error", file=sys.stderr) is None
    print("without an end", end="")
    assert "from the script\n╭" in console.file.getvalue().replace("\x1b[2K", "").replace("\x1b[1A", "").replace("\r", "")
    writer.close()
    assert sys.stdout is out and sys.stderr is err and out.getvalue() == ""
    assert "an error" in console.file.getvalue() and "without an end" in console.file.getvalue()
    print("after it")
    assert out.getvalue() == "after it\n"


def test_a_stream_that_was_replaced_meanwhile_stays(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    writer = ConsoleWriter(console=terminal())
    writer.write(record(1))
    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", other)
    writer.close()
    assert sys.stdout is other


def screen_of(output, width, height=400):
    """What a terminal shows after this output: the few codes that a display in place is made of."""
    rows, row, column, place = [[" "] * width for _ in range(height)], 0, 0, 0
    while place < len(output):
        if output.startswith("\x1b[", place):
            end = next(i for i in range(place + 2, len(output)) if output[i].isalpha())
            number, code = output[place + 2:end], output[end]
            if code == "A":
                row -= int(number or 1)
            elif code == "K":
                rows[row] = [" "] * width
            else:
                assert code in "hlm", code
            place = end + 1
            continue
        if output[place] == "\n":
            row, column = row + 1, 0
        elif output[place] == "\r":
            column = 0
        else:
            rows[row][column] = output[place]
            column += 1
        place += 1
    return "\n".join("".join(each).rstrip() for each in rows).rstrip().split("\n")


def test_no_line_is_lost_or_broken_while_two_threads_write(monkeypatch):
    console = terminal()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    writer = ConsoleWriter(total_steps=100, console=console)
    writer.write(record(1))

    def train():
        for step in range(2, 101):
            begins, ends = step % 10 == 2, step % 10 == 7  # so that the panel grows and shrinks
            incident = replace(BEGUN, first_step=step - 5 * ends, state="end" if ends else "begin")
            writer.write(alarm(step, incident) if begins or ends else record(step))
        writer.close()

    thread = threading.Thread(target=train)
    try:
        thread.start()
        for number in range(200):
            print(f"line {number}")
        thread.join()
    finally:
        sys.setswitchinterval(before)
    shown = screen_of(console.file.getvalue() + sys.stdout.getvalue(), 110)
    assert [line for line in shown if line.startswith("line ")] == [f"line {number}" for number in range(200)]
    assert sum(line.startswith("NonFinite") for line in shown) == 20
    assert sum(line.startswith("╭") for line in shown) == 1


@pytest.mark.skipif(not hasattr(os, "fork") or sys.version_info >= (3, 12), reason="3.12 warns of a fork beside threads")
def test_a_forked_process_prints_without_the_panel_even_if_it_was_being_drawn(tmp_path, monkeypatch):
    file = open(tmp_path / "out", "w+")
    monkeypatch.setattr(sys, "stdout", file)
    screen = Screen(terminal())
    screen.show("shown")
    held, go = threading.Event(), threading.Event()

    def hold():
        with screen._lock:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        print("from the child", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    thread.join()
    screen.stop()
    file.close()
    assert (tmp_path / "out").read_text() == "from the child\n"
