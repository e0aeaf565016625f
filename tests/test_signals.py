"""SIGTERM: the function is called once, and then happens what would have happened without it."""
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from instrument.signals import OnTermination

ROOT = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_handler_before_has_its_say():
    calls = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append("before"))
    OnTermination(lambda: calls.append("ours")).install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == ["ours", "before"]
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == ["ours", "before", "before"]


def test_what_was_there_is_put_back():
    def before(number, frame):
        pass

    signal.signal(signal.SIGTERM, before)
    termination = OnTermination(lambda: None)
    termination.install()
    termination.install()
    assert signal.getsignal(signal.SIGTERM) != before
    termination.remove()
    termination.remove()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_came_later_stays():
    def later(number, frame):
        pass

    termination = OnTermination(lambda: None)
    termination.install()
    signal.signal(signal.SIGTERM, later)
    termination.remove()
    assert signal.getsignal(signal.SIGTERM) is later


def test_another_thread_installs_nothing():
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=OnTermination(lambda: None).install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_all_that_listen_are_called_though_installed_again_and_again():
    calls = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append("before"))
    first, second = OnTermination(lambda: calls.append("first")), OnTermination(lambda: calls.append("second"))
    for _ in range(2):
        for termination in (first, second):
            termination.install()
        for termination in (first, second):
            termination.remove()
    first.install()
    second.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert sorted(calls) == ["before", "first", "second"]


def test_a_handler_over_ours_that_calls_it_ends():
    calls = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append("before"))
    termination = OnTermination(lambda: calls.append("ours"))
    termination.install()
    ours = signal.getsignal(signal.SIGTERM)

    def over(number, frame):
        calls.append("over")
        ours(number, frame)

    signal.signal(signal.SIGTERM, over)
    termination.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == ["ours", "over", "before"]


def test_a_second_signal_does_not_interrupt_the_function():
    calls = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append("before"))

    def save():
        calls.append("begin")
        os.kill(os.getpid(), signal.SIGTERM)
        calls.append("end")

    OnTermination(save).install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == ["begin", "end", "before"]


def test_an_error_does_not_keep_the_process(capsys):
    calls = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append("before"))
    OnTermination(lambda: 1 / 0).install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == ["before"] and "ZeroDivisionError" in capsys.readouterr().err


def test_the_process_ends_by_the_signal():
    code = ("import os, signal; from instrument.signals import OnTermination\n"
            "OnTermination(lambda: print('saved', flush=True)).install(); os.kill(os.getpid(), signal.SIGTERM); print('no')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ROOT})
    assert done.returncode == -signal.SIGTERM and done.stdout == "saved\n"
