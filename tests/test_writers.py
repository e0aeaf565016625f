"""Writers: what is in the files, on the console, and what survives a crash."""
import io
import math
import struct
import subprocess
import sys
import textwrap

import orjson
import pytest
from rich.console import Console

from hostile import events_of
from instrument.record import Record
from instrument.writers import ConsoleWriter, JsonlWriter, TensorBoardWriter, Writer


def write(writer, *records):
    with writer:
        for record in records:
            writer.write(record)


def scalars_of(run):
    """Every event with a scalar, of every event file: [(step, wall time, {tag: value})]."""
    return [(event.step, event.wall_time, {value.tag: value.simple_value for value in event.summary.value})
            for event in events_of(run) if event.summary.value]


@pytest.fixture(params=[JsonlWriter, TensorBoardWriter])
def writer_type(request):
    return request.param


def steps_of(run):
    """Steps of all records in a run, in whichever format it has."""
    return [step for step, _, _ in scalars_of(run)] + [
        orjson.loads(line)["step"] for file in run.glob("*.jsonl") for line in file.read_bytes().splitlines()]


# TensorBoard

def test_an_event_has_every_scalar_with_step_and_time(tmp_path):
    write(TensorBoardWriter(tmp_path), Record(10, 1735387200.5, {"loss": 2.5, "grad/norm": 0.75}),
          Record(11, 1735387201.5, {"loss": 2.25, "grad/norm/blocks.0.weight": 1e-30}))
    small = struct.unpack("f", struct.pack("f", 1e-30))[0]  # an event holds float32
    assert scalars_of(tmp_path) == [(10, 1735387200.5, {"loss": 2.5, "grad/norm": 0.75}),
                                   (11, 1735387201.5, {"loss": 2.25, "grad/norm/blocks.0.weight": small})]


def test_nan_and_infinities_are_written_without_a_word(tmp_path, caplog, capfd):
    write(TensorBoardWriter(tmp_path), Record(1, 0.0, {"loss": math.nan, "a": math.inf, "b": -math.inf}))
    (_, _, scalars), = scalars_of(tmp_path)
    assert math.isnan(scalars["loss"]) and scalars["a"] == math.inf and scalars["b"] == -math.inf
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_records_reach_the_disk_every_few_seconds_and_at_flush(tmp_path):
    writer = TensorBoardWriter(tmp_path, flush_seconds=5.0)
    seen = []
    for step, time in enumerate((100.0, 104.0, 105.0, 106.0)):
        writer.write(Record(step, time, {"loss": 0.0}))
        seen.append(len(scalars_of(tmp_path)))
    writer.flush()
    assert seen + [len(scalars_of(tmp_path))] == [1, 1, 3, 3, 4]
    writer.close()


# Both

def test_making_a_writer_makes_no_file(tmp_path, writer_type):
    writer = writer_type(tmp_path / "run")
    writer.flush()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_record_after_close_is_kept_beside_the_older_ones(tmp_path, writer_type):
    writer = writer_type(tmp_path)
    for step in (1, 2, 3):
        writer.write(Record(step, 0.0, {"loss": 1.0}))
        writer.close()
        writer.close()
    assert sorted(steps_of(tmp_path)) == [1, 2, 3]


def test_the_last_record_survives_a_program_that_does_not_close(tmp_path, writer_type):
    # A daemon thread holds the writer, so that Python does not clear it, and its files with it, at the end.
    program = f"""
        import threading, time
        from instrument.record import Record
        from instrument.writers import {writer_type.__name__}
        writer = {writer_type.__name__}({str(tmp_path)!r})
        for step in (1, 2, 3):
            writer.write(Record(step, 10.0, {{"loss": 1.0}}))
        threading.Thread(target=lambda held: time.sleep(60), args=[writer], daemon=True).start()
        raise SystemExit("over")
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert result.stderr == "over\n" and steps_of(tmp_path) == [1, 2, 3]


def test_a_class_without_write_is_no_writer():
    class Mute(Writer):
        pass
    with pytest.raises(TypeError, match="write"):
        Mute()


def test_rich_and_tensorboardx_are_loaded_on_first_use():
    program = """if True:
        import sys, instrument.writers as writers
        assert not {'rich', 'tensorboardX', 'mindspore'} & set(sys.modules)
        writers.ConsoleWriter, writers.TensorBoardWriter
        assert {'rich', 'tensorboardX'} <= set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", program], check=True)


# Console

def console(width=100, terminal=False):
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, legacy_windows=False)


def course(steps, total):
    """Records one second apart, the first after a compilation."""
    return [Record(step, 100.0 + step, {
        "loss": 5.0 - 4.0 * step / total, "grad/norm": 0.5, "learning_rate": 1e-3, "activation/rms/blocks.0": 1.0,
        "activation/rms/blocks.1": 3.25}) for step in range(1, steps + 1)]


def test_a_log_gets_a_line_every_few_steps_and_the_last():
    output = console()
    writer = ConsoleWriter(total_steps=100, line_every=10, console=output)
    write(writer, *course(25, 100))
    lines = output.file.getvalue().splitlines()
    assert [line.split("  loss")[0] for line in lines] == [
        "step   1/100", "step  11/100", "step  21/100", "step  25/100"]
    assert lines[-1] == ("step  25/100  loss 4.0000  gradient norm 0.5000  learning rate 1.00e-03  "
                         "largest rms 3.250 blocks.1  1.00 s/step  1:15 left")


def test_a_log_without_a_known_end_tells_no_time_left():
    output = console()
    writer = ConsoleWriter(console=output)
    for record in course(11, 100):
        writer.write(record)
    lines = output.file.getvalue().splitlines()
    assert lines[-1].startswith("step 11  loss") and lines[-1].endswith("1.00 s/step")


def test_what_is_missing_is_a_dash_and_what_is_not_finite_wins():
    output = console()
    ConsoleWriter(console=output).write(Record(1, 0.0, {
        "loss": math.inf, "activation/rms/a": 9.0, "activation/rms/b": math.nan, "learning_rate/0": 0.5}))
    assert output.file.getvalue() == ("step 1  loss inf  gradient norm -  learning rate 5.00e-01  largest rms nan b\n")


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_terminal_gets_every_number_at_any_width(width):
    output = console(width, terminal=True)
    writer = ConsoleWriter(total_steps=100, console=output)
    write(writer, *course(50, 100))
    panel = output.file.getvalue().rpartition("╭")[2]
    for text in ("step  50/100", "0:50 left", "1.00 s/step", "3.0000", "0.5000", "1.00e-03", "3.250"):
        assert text in panel
    assert all(len(line) == width for line in panel.splitlines()[1:5])
    assert ("█▇▆▅▄▃▂▁" in panel) == (width >= 100)


def test_a_terminal_keeps_its_cursor_whatever_ends_the_process():
    output = console(terminal=True)
    writer = ConsoleWriter(total_steps=100, console=output)
    for record in course(3, 100):
        writer.write(record)
        assert output.file.getvalue().rfind("\x1b[?25h") > output.file.getvalue().rfind("\x1b[?25l")
    writer.close()
    assert output.file.getvalue().rfind("\x1b[?25h") > output.file.getvalue().rfind("\x1b[?25l")
