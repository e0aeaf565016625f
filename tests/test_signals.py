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


IN_C = "import hashlib, os, signal, sys, threading, time\nfrom instrument import signals, wakeup\n"
IN_C += "wakeup.SECONDS_TO_ANSWER = 0.3\n"
IN_C += "def in_c(rounds): hashlib.pbkdf2_hmac('sha256', b'', b'', rounds)\n"  # other threads run meanwhile
IN_C += "began = time.perf_counter(); in_c(10 ** 5); second = int(10 ** 5 / (time.perf_counter() - began))\n"
IN_C += "def send(): time.sleep(0.3); os.kill(os.getpid(), signal.SIGTERM)\n"


def ends(code):
    """How a process ends whose main thread is in C when SIGTERM comes."""
    return subprocess.run([sys.executable, "-c", IN_C + code], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": ROOT})


def test_a_process_whose_main_thread_is_stuck_in_c_ends_too():
    done = ends("signals.OnTermination(lambda: print('saved', flush=True)).install()\n"
                "threading.Thread(target=send).start(); in_c(60 * second); print('no')")
    assert done.returncode == -signal.SIGTERM and done.stdout == "saved\n", done.stderr


def test_so_it_does_where_the_function_is_stuck_as_well():
    done = ends("signals._SECONDS_WITHOUT_THE_MAIN_THREAD = 0.5\n"
                "signals.OnTermination(lambda: (print('begun', flush=True), in_c(60 * second))).install()\n"
                "threading.Thread(target=send).start(); in_c(60 * second); print('no')")
    assert done.returncode == -signal.SIGTERM and done.stdout == "begun\n", done.stderr


def test_a_handler_of_somebody_else_waits_for_the_main_thread():
    done = ends("signal.signal(signal.SIGTERM, lambda number, frame: (print('theirs', flush=True), sys.exit(3)))\n"
                "signals.OnTermination(lambda: print('saved', flush=True)).install()\n"
                "threading.Thread(target=send).start(); in_c(2 * second); print('no')")
    assert done.returncode == 3 and done.stdout == "saved\ntheirs\n", done.stderr


def test_a_signal_to_a_forked_process_ends_nothing_else():
    done = ends("signals.OnTermination(lambda: print('saved', flush=True)).install()\n"
                "child = os.fork()\n"
                "if not child: time.sleep(60); os._exit(0)\n"
                "time.sleep(0.2); os.kill(child, signal.SIGTERM); print(os.waitpid(child, 0)[1], flush=True)\n"
                "in_c(2 * second); print('goes on', flush=True)")
    assert done.returncode == 0 and done.stdout == f"{int(signal.SIGTERM)}\ngoes on\n", done.stderr


def test_a_wakeup_of_somebody_else_stays():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    try:
        termination = OnTermination(lambda: None)
        termination.install()
        termination.remove()
    finally:
        assert signal.set_wakeup_fd(-1) == writer
        os.close(reader)
        os.close(writer)


def test_nothing_is_left_of_a_wakeup():
    before = signal.set_wakeup_fd(-1)
    termination = OnTermination(lambda: None)
    termination.install()
    termination.remove()
    assert before == signal.set_wakeup_fd(-1) == -1
