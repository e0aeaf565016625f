"""The server as a process: its sockets, how soon a line arrives, and browsers that do not listen."""
import json
import statistics
import time
import urllib.error
import urllib.request

import psutil
import pytest
import runs_made

client = pytest.importorskip("websockets.sync.client")


def connected(server, path="/live", **options):
    # Entered by hand: releases differ in whether connect() may be used in another way.
    return client.connect(f"ws://127.0.0.1:{server.port}{path}", max_size=None, **options).__enter__()


class Socket:
    """A browser that draws nothing."""

    def __init__(self, server, *, headers=None, visible=("loss",), **view):
        self.connection = connected(server, origin=f"http://127.0.0.1:{server.port}", additional_headers=headers or {})
        query = "&".join(f"{name}={value}" for name, value in view.items())
        self.say({"do": "open", "address": f"?{query}"})
        self.say({"do": "look", "visible": list(visible)})

    def say(self, message):
        self.connection.send(json.dumps(message))

    def take(self, *, timeout=10.0, answer=True):
        message = json.loads(self.connection.recv(timeout=timeout))
        if answer:
            self.say({"do": "got", "n": message["n"]})
        return message

    def until(self, condition, seconds=20.0):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            message = self.take(timeout=deadline - time.monotonic())
            if condition(message):
                return message
        raise AssertionError("it did not come")


def last_step(message):
    series = message.get("charts", {}).get("loss", {})
    points = (series["option"]["series"][0]["data"] if "kind" in series else
              next((each["add"] for each in series["series"] if each["id"] == "line:0:loss"), [])) if series else []
    return points[-1][0] if points else None


def test_a_line_is_on_the_wire_within_a_second(tmp_path, serve):
    made = runs_made.Made(tmp_path / "runs" / "a")
    made.metrics({"step": 1, "time": time.time(), "loss": 1.0})
    server = serve(tmp_path / "runs")
    socket = Socket(server)
    socket.until(lambda message: last_step(message) == 1)
    waits = []
    for step in range(2, 12):
        start = time.monotonic()
        made.metrics({"step": step, "time": time.time(), "loss": 1.0})
        socket.until(lambda message, step=step: last_step(message) == step)
        waits.append(time.monotonic() - start)
    assert statistics.median(waits) < 1.0 and max(waits) < 2.0  # the bound is 1 s; two busy cores may be late once


def test_a_run_that_begins_later_is_shown_by_itself(tmp_path, serve):
    server = serve(tmp_path / "runs")
    assert "does not exist yet" in server.log.read_text()
    socket = Socket(server)
    assert socket.take()["runs"] == []
    runs_made.Made(tmp_path / "runs" / "a").metrics({"step": 7, "time": time.time(), "loss": 1.0})
    socket.until(lambda message: last_step(message) == 7)


def test_a_browser_that_does_not_listen_is_sent_nothing_more_and_costs_nobody(tmp_path, serve):
    made = runs_made.Made(tmp_path / "runs" / "a")
    made.metrics({"step": 1, "time": time.time(), "loss": 1.0})
    server = serve(tmp_path / "runs")
    asleep = [Socket(server) for _ in range(20)]
    for socket in asleep:
        socket.take(answer=False)
    awake = Socket(server)
    awake.until(lambda message: last_step(message) == 1)
    memory = psutil.Process(server.process.pid).memory_info().rss
    for first in range(2, 10_002, 500):
        made.metrics(*({"step": step, "time": time.time(), "loss": 1.0} for step in range(first, first + 500)))
        awake.until(lambda message, last=first + 499: last_step(message) == last)
    for socket in asleep:
        with pytest.raises(TimeoutError):
            socket.take(timeout=0.01)
    assert psutil.Process(server.process.pid).memory_info().rss - memory < 40e6
    # Awake again, it gets what it missed, once.
    asleep[0].say({"do": "got", "n": 1})
    asleep[0].until(lambda message: last_step(message) == 10_001)


def test_a_server_that_is_killed_while_it_reads_leaves_no_process(tmp_path, serve):
    runs_made.large(tmp_path / "runs" / "large", steps=40_000)
    server = serve(tmp_path / "runs")
    connection = Socket(server)
    process, helpers = psutil.Process(server.process.pid), []
    deadline = time.monotonic() + 30
    while not helpers and time.monotonic() < deadline:
        helpers = [each for each in process.children(recursive=True) if "spawn_main" in " ".join(each.cmdline())]
        time.sleep(0.01)
    server.process.kill()
    server.process.wait()
    connection.connection.close()
    assert helpers
    _, alive = psutil.wait_procs(helpers, timeout=10)
    assert alive == []


def test_sockets_and_page_of_other_sites_are_refused(tmp_path, serve):
    runs_made.Made(tmp_path / "runs" / "a")
    server = serve(tmp_path / "runs", "--port", "0", "--token", "a-long-secret")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/")
    with pytest.raises(Exception, match="401|403"):
        Socket(server)
    for path in ("/live", "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"):
        with pytest.raises(Exception, match="403"):
            connected(server, path, origin="http://evil.example", additional_headers={"Authorization": "Bearer a-long-secret"})
    assert Socket(server, headers={"Authorization": "Bearer a-long-secret"}).take()["runs"]
    for path in ("/instrument/..%2f..%2f..%2f..%2f..%2fetc%2fpasswd", "/instrument/../../cli.py", "/runs/a/config.json"):
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}",
                                         headers={"Authorization": "Bearer a-long-secret"})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(request)


def test_mindspore_is_never_imported(tmp_path, serve, monkeypatch):
    (tmp_path / "fake" / "mindspore").mkdir(parents=True)
    (tmp_path / "fake" / "mindspore" / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    runs_made.large(tmp_path / "runs" / "large", steps=40_000)  # so much that other processes help
    socket = Socket(serve(tmp_path / "runs"), visible=("loss", "table", "heat"))
    socket.until(lambda message: last_step(message) == 40_000, 60)
    assert not (tmp_path / "imported").exists()


def test_nonsense_on_a_socket_ends_that_socket_alone(tmp_path, serve):
    runs_made.Made(tmp_path / "runs" / "a").metrics({"step": 1, "time": time.time(), "loss": 1.0})
    server = serve(tmp_path / "runs")
    for said in ("nonsense", "[]", "1", '{"do":"open"}' + " " * 100_000, "{" * 50_000):
        with client.connect(f"ws://127.0.0.1:{server.port}/live") as connection:
            connection.send(said)
            with pytest.raises(Exception, match="1008|1009|policy|too"):
                connection.recv(timeout=10)
    socket = Socket(server)
    for wish in ({"do": "zoom", "x": ["a", None]}, {"do": "zoom", "x": [1e300, -1e300]},
                 {"do": "set", "name": "at", "value": "x"},
                 {"do": "set", "name": "nothing"}, {"do": "steps", "range": {}}, {"do": "look", "visible": 3}, {"do": "what"}):
        socket.say(wish)
    socket.say({"do": "steps", "range": [3, 9]})
    socket.until(lambda message: message.get("address") == "?from=3&to=9")


def test_a_port_in_use_is_said(tmp_path, serve):
    runs_made.Made(tmp_path / "runs" / "a")
    first = serve(tmp_path / "runs")
    second = serve(tmp_path / "runs", "--port", str(first.port))
    assert second.port > first.port and f"Port {first.port} is in use" in second.log.read_text()
