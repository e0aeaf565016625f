"""A server as a user starts it, and a real browser in front of it.

Tests that need either are skipped where it is missing; with TEST_BROWSER=required in the environment they fail.
"""
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")  # else Playwright's own
REQUIRED = os.environ.get("TEST_BROWSER") == "required"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]


def missing(what):
    (pytest.fail if REQUIRED else pytest.skip)(f"needs {what}")


def _need_nicegui():
    # Not by importing it, which on Python 3.9 fails after another test has run an event loop.
    if importlib.util.find_spec("nicegui") is None:
        missing("NiceGUI: pip install 'mindspore-instrument[dashboard]'")


class Serve:
    """`instrument serve` in a process of its own."""

    def __init__(self, runs, *options, log):
        self.log = log
        command = [sys.executable, "-m", "instrument.cli", "serve", str(runs), *options]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with open(log, "wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=log.parent,
                                            env={**os.environ, "PYTHONPATH": path})
        self.address = self._address()

    def _address(self):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            text = self.log.read_text()
            if "Open " in text and "\n" in text.partition("Open ")[2]:
                return text.partition("Open ")[2].split()[0]
            time.sleep(0.05)
        raise AssertionError(f"the server did not start: {self.log.read_text()}")

    @property
    def port(self):
        return int(self.address.split(":")[2].split("/")[0])

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@pytest.fixture
def serve(tmp_path):
    """`serve(directory, *options)` starts a server; all are ended after the test."""
    _need_nicegui()
    started = []

    def start(runs, *options):
        started.append(Serve(runs, *(options or ("--port", "0")), log=tmp_path / f"serve-{len(started)}.log"))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop()
        # Killed, it and its helpers had no time to end in order.
        assert server.process.returncode == -9 or "Traceback" not in server.log.read_text(), server.log.read_text()


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """One server for many tests: `shared.runs` is its directory, `shared.page(run)` the page of a run in it."""
    _need_nicegui()
    directory = tmp_path_factory.mktemp("shared")
    (directory / "runs").mkdir()
    server = Serve(directory / "runs", "--port", "0", log=directory / "serve.log")
    server.runs = directory / "runs"
    server.page = lambda *runs: server.address + "?" + "&".join("run=" + quote(run, safe="") for run in runs)
    yield server
    server.stop()
    assert "Traceback" not in server.log.read_text(), server.log.read_text()


@pytest.fixture(scope="session")
def chromium():
    if importlib.util.find_spec("playwright") is None:
        missing("Playwright: pip install playwright")
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        if CHROMIUM is None and not os.path.exists(playwright.chromium.executable_path):
            missing("Chromium: apt-get install chromium, or playwright install chromium")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def look(chromium):
    """`look(address, **options)` opens a page, which must ask nobody but the server, and show no error."""
    opened, outside, errors = [], [], []

    def open_page(address, *, width=1280, height=900, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        opened.append(context)
        page = context.new_page()
        page.set_default_timeout(40_000)
        inside = ("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:", "file:")
        page.on("request", lambda request: request.url.startswith(inside) or outside.append(request.url))
        page.on("websocket", lambda socket: socket.url.startswith(inside) or outside.append(socket.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        # A server that is started anew is missed meanwhile, which the browser itself notes as an error.
        page.on("console", lambda message: message.type == "error" and "ERR_CONNECTION_REFUSED" not in message.text
                and errors.append(message.text))
        page.goto(address)
        return page

    yield open_page
    for context in opened:
        context.close()
    assert outside == [] and errors == []
