"""`instrument tensorboard`: TensorBoard beside training, on a port that is free, for as long as this command lives.

Owns the port and the life of the process; what it shows is TensorBoard's own work. Does not import MindSpore.
"""
from __future__ import annotations

import ctypes
import importlib.util
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

PORT = 6006


def command(directory: str, port: int) -> list[str]:
    """How TensorBoard is started, in the Python that runs this."""
    return [sys.executable, "-m", "tensorboard.main", "--logdir", directory, "--port", str(port), "--host", "127.0.0.1"]


def is_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def free_port(first: int = PORT, tries: int = 100) -> int:
    """The first port from `first` on that nobody listens at on this machine.

    Raises:
        OSError: None of them is free.
    """
    for port in range(first, min(first + tries, 65536)):
        with socket.socket() as probe:
            if sys.platform != "win32":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {first} to {first + tries - 1} is free on this machine. Give another one by --port.")


def run(directory: str, port: int, announce: Callable[[str], None], *,
        start: Callable[[str, int], Sequence[str]] = command) -> int:
    """Run TensorBoard until it ends or this process is told to; both end together.

    Args:
        directory: Where runs are.
        port: The port, or the first that may be tried.
        announce: Called with the lines for the user.
        start: The command line for a directory and a port.

    Returns:
        TensorBoard's exit status, negative after a signal; 0 where this process was interrupted or terminated.
    """
    found = free_port(port)
    process = subprocess.Popen(list(start(directory, found)), preexec_fn=_end_with_parent if sys.platform == "linux" else None)
    announce(f"TensorBoard for {directory}: http://127.0.0.1:{found} (Ctrl-C ends it)")
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """Ask Linux to end this process when its parent dies, however that dies (prctl PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
