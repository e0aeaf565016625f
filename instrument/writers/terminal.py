"""`Screen`: something that stays at the bottom of a terminal while threads print above it.

Owns the terminal's cursor and Python's `sys.stdout` and `sys.stderr` from `show` to `stop`. What is shown is the caller's
part.

rich has all of it for one thread. With two, a print that is laid out for an old height of the display can reach the terminal
after a new one was drawn, and then overwrites lines above it; hence one lock around either.
"""
from __future__ import annotations

import os
import sys
import threading
from typing import IO

from rich.console import Console, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.segment import Segments
from rich.text import Text


class Screen:
    """Shows one renderable at the bottom of a console.

    Args:
        console: A console on a terminal.
    """

    def __init__(self, console: Console):
        self.console = console
        self._lock = threading.RLock()  # of one thread, since a signal handler may print too
        self._live: Live | None = None
        self._replaced: dict[str, tuple[IO[str], FileProxy]] = {}

    def print(self, text: Text) -> None:
        """Print above what is shown."""
        with self._lock:
            self.console.print(text)

    def show(self, renderable: RenderableType) -> None:
        """Show this in place of what is there."""
        # Laid out once, and not again for each print.
        laid_out = Segments(list(self.console.render(renderable)))
        with self._lock:
            if self._live is None:
                self._redirect()  # first, so that nothing is printed into what is drawn
                self._live = Live(console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
                self._live.start()
                self.console.show_cursor(True)  # MindSpore can end the process at Ctrl-C, and nobody would show it again
            self._live.update(laid_out, refresh=True)

    def stop(self) -> None:
        """Leave what is shown where it is, and give the terminal back."""
        with self._lock:
            if self._live is None:
                return
            for name, (file, proxy) in self._replaced.items():
                proxy.flush()  # a line that has not ended
                if getattr(sys, name) is proxy:  # else somebody has replaced it since
                    setattr(sys, name, file)
            self._replaced.clear()
            self._live.stop()
            self._live = None

    def _redirect(self) -> None:
        for name in ("stdout", "stderr"):
            file = getattr(sys, name)
            if file is not None and not isinstance(file, FileProxy):
                proxy = _Proxy(self.console, file, self._lock)
                self._replaced[name] = file, proxy
                setattr(sys, name, proxy)


class _Proxy(FileProxy):
    """Prints above the display, one thread at a time."""

    def __init__(self, console: Console, file: IO[str], lock: threading.RLock):  # type: ignore[valid-type]
        super().__init__(console, file)
        self._lock, self._process = lock, os.getpid()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.rich_proxied_file, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if os.getpid() != self._process:
            # A forked worker of a dataset: the display is not its own, and a thread that it has not may hold the lock.
            return self.rich_proxied_file.write(text)
        with self._lock:
            super().write(text)
        return len(text)

    def flush(self) -> None:
        if os.getpid() != self._process:
            self.rich_proxied_file.flush()
            return
        with self._lock:
            super().flush()
