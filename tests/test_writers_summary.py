"""MindSpore's SummaryRecord: what it writes is what was given, and what it does not allow is said."""
import os
import subprocess
import sys
import textwrap

import pytest

from instrument.record import Record
from instrument.writers import SummaryRecordWriter
from instrument.writers.extras import require

BEGIN = """
    import math, os, signal, struct, threading, time
    from pathlib import Path
    from instrument.record import Record
    from instrument.writers import SummaryRecordWriter

    def scalars(directory):
        from mindspore.train.summary_pb2 import Event
        found = []
        for file in sorted(Path(directory).iterdir()):
            content = file.read_bytes()
            while content:
                length, = struct.unpack_from("<Q", content)
                event = Event.FromString(content[12:12 + length])
                content = content[16 + length:]
                found += [(event.step, value.tag, value.scalar_value) for value in event.summary.value]
        return found
"""


def run(program, directory):
    """Run it as a script of its own: SummaryRecord forks, or starts its script anew."""
    path = directory / "script.py"
    main = textwrap.indent(textwrap.dedent(program), "    ")
    path.write_text(f"{textwrap.dedent(BEGIN)}\nif __name__ == '__main__':\n{main}")
    paths = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run([sys.executable, str(path), str(directory / "summary")], capture_output=True, text=True,
                            timeout=120, env={**os.environ, "PYTHONPATH": paths, "GLOG_v": "3"})
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.compiles
def test_scalars_come_back_from_a_thread_and_after_close(tmp_path):
    output = run("""
        import sys
        directory = sys.argv[1]
        writer = SummaryRecordWriter(directory)
        assert not Path(directory).exists()

        def write():
            writer.write(Record(1, 0.0, {"loss": 2.5, "a b/ü": math.nan, "c": math.inf}))
            writer.write(Record(2, 0.0, {}, {}, {"text": "x"}))
            for step in range(3, 30):
                writer.write(Record(step, 0.0, {"loss": float(step)}))
            writer.flush()
            writer.close()
            writer.close()
            writer.write(Record(30, 0.0, {"loss": 3.5}))
            writer.close()

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        found = scalars(directory)
        assert found[0] == (1, "loss", 2.5) and found[2] == (1, "c", math.inf), found
        assert found[1][:2] == (1, "a b/ü") and math.isnan(found[1][2]), found
        assert found[3:] == [(step, "loss", float(step)) for step in range(3, 30)] + [(30, "loss", 3.5)], found
        print("read back")
    """, tmp_path)
    assert output == "read back\n"


@pytest.mark.compiles
def test_a_second_one_and_one_whose_process_has_ended_say_so_and_do_not_hang(tmp_path):
    output = run("""
        import sys
        first, second = SummaryRecordWriter(sys.argv[1]), SummaryRecordWriter(sys.argv[1] + "2")
        first.write(Record(1, 0.0, {"loss": 1.0}))
        try:
            second.write(Record(1, 0.0, {"loss": 1.0}))
        except RuntimeError as error:
            assert "one SummaryRecord in a process at a time" in str(error), error
            print("second refused")
        second.close()

        process = first._summary._event_writer
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for step in range(2, 40):  # more than its queue holds
            try:
                first.write(Record(step, 0.0, {"loss": 1.0}))
            except RuntimeError as error:
                assert "has ended with exit code -9" in str(error), error
                if step == 39:
                    print("end told")
        first.flush()
        first.close()

        second.write(Record(1, 0.0, {"loss": 1.0}))
        second.close()
        print(scalars(sys.argv[1] + "2"))
    """, tmp_path)
    assert output == "second refused\nend told\n[(1, 'loss', 1.0)]\n"


def test_mindspore_that_is_missing_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mindspore", None)
    with pytest.raises(ImportError, match=r'^mindspore is not installed.*: pip install "mindspore-instrument\[mindspore\]"'):
        SummaryRecordWriter(tmp_path).write(Record(1, 0.0, {"loss": 1.0}))


def test_a_package_that_is_there_and_broken_keeps_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "there.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="^No module named 'not_there_at_all'$"):
        require("there", "extra")


def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it():
    with pytest.raises(ImportError) as raised:
        require("not_there_at_all", "wandb")
    assert str(raised.value) == ('not_there_at_all is not installed. Install it by: '
                                 'pip install "mindspore-instrument[wandb]"')
