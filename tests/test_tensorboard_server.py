"""`instrument tensorboard`: a free port, and a process that ends with ours."""
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from instrument import tensorboard_server
from instrument.cli import main

ROOT = str(Path(__file__).parents[1])

# A stand-in that writes where it is, and then waits.
STAND_IN = """
import sys; sys.path.insert(0, sys.argv[2])
from instrument import tensorboard_server
code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
sys.exit(tensorboard_server.run("runs", 6006, lambda line: print(line, flush=True),
                                start=lambda directory, port: [sys.executable, "-c", code, sys.argv[1]]))
"""


def waited(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_a_port_in_use_is_passed_over():
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        assert tensorboard_server.free_port(port) > port
        with pytest.raises(OSError, match=f"no port from {port} to {port} is free"):
            tensorboard_server.free_port(port, tries=1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_its_parent(tmp_path, number):
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux ends a child whose parent is killed")
    told = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", STAND_IN, str(told), ROOT], stdout=subprocess.PIPE, text=True)
    assert waited(lambda: told.exists() and told.read_text())
    child = int(told.read_text())
    assert parent.stdout.readline().startswith("TensorBoard for runs: http://127.0.0.1:")
    os.kill(parent.pid, number)
    parent.wait(20)
    parent.stdout.close()
    assert waited(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_what_is_missing_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tensorboard_server, "is_installed", lambda: False)
    assert main(["tensorboard", str(tmp_path)]) == 1
    assert "pip install tensorboard" in capsys.readouterr().err
    monkeypatch.setattr(tensorboard_server, "is_installed", lambda: True)
    assert main(["tensorboard", str(tmp_path / "none")]) == 1
    assert "there is no directory" in capsys.readouterr().err


@pytest.mark.skipif(not tensorboard_server.is_installed(), reason="needs TensorBoard: pip install tensorboard")
def test_the_real_one_answers(tmp_path):
    parent = subprocess.Popen([sys.executable, "-m", "instrument.cli", "tensorboard", str(tmp_path)], stdout=subprocess.PIPE,
                              text=True, env={**os.environ, "PYTHONPATH": ROOT})
    try:
        address = parent.stdout.readline().split("http://")[1].split()[0]

        def answers():
            try:
                return urllib.request.urlopen(f"http://{address}", timeout=2).status == 200
            except OSError:
                return False

        assert waited(answers, 60)
    finally:
        parent.terminate()
        parent.wait(20)
        parent.stdout.close()
