"""How long a large run takes to be shown, what it costs the server and the browser, and how late a line arrives.

    python benchmarks/dashboard.py                                  # everything: 1,000,000 steps of 50 metrics, 100 browsers
    python benchmarks/dashboard.py --steps 100000 --updates 10000   # quickly

Four questions, against the bounds that the live view is built for:

- index: the server reads the history of a run for the first time (bound: 20 s), and its memory then (bound: 2 GB);
- open: a browser opens that run afterwards, from the start of its navigation to the drawn core charts (bound: 2 s);
- many: 100 sockets look at one run that gets five lines a second; how late the lines come (bound: 1 s), and the server's CPU;
- growth: a browser stays open for 100,000 lines; JavaScript's heap, after collection, before and after (bound: no growth).

The browser is Chromium without a GPU, on the same cores as the server. No number is the best of several: each thing happens
once, as it does to a user, except for opening, which is repeated.
"""
from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "dashboard")]

import conftest  # noqa: E402, I001  the tests' own way to start a server and a browser
import runs_made  # noqa: E402

from benchmarks.timing import print_machine, print_result  # noqa: E402


_VISIBLE = "loss", "rate", "grad", "throughput", "memory", "weights"  # what a screen shows at once


def memory(server: conftest.Serve) -> float:
    """Resident memory of the server and its processes, in MB."""
    process = psutil.Process(server.process.pid)
    return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)]) / 1e6


def index_and_open(runs: Path, steps: int, metrics: int, browser) -> dict[str, float]:
    start = time.perf_counter()
    runs_made.large(runs / "large", steps=steps, metrics=metrics)
    size = (runs / "large" / "metrics-00000.jsonl").stat().st_size
    print(f"made {size / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s", flush=True)
    server = conftest.Serve(runs, "--port", "0", log=runs.parent / "index.log")
    peak = 0.0

    def watch() -> None:
        nonlocal peak
        while server.process.poll() is None:
            try:
                peak = max(peak, memory(server))
            except psutil.Error:
                break
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()
    ready = "() => window.instrumentLive && ['loss', 'rate', 'grad'].every(id => { const c = instrumentLive.cards.get(id);" \
            " return c && c.plot.chart && c.plot.option.series.length > 1; })"
    try:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        start = time.perf_counter()
        page.goto(server.address)
        page.wait_for_selector(".iv-index", timeout=20_000)
        page.wait_for_function(ready, timeout=300_000)
        indexed = time.perf_counter() - start
        spent_by = psutil.Process(server.process.pid).cpu_times()
        page.close()
        opens, spent = [], []
        for _ in range(7):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            start = time.perf_counter()
            page.goto(server.address, wait_until="commit")
            page.wait_for_function(ready, timeout=60_000, polling=20)
            opens.append(time.perf_counter() - start)
            points = page.evaluate("instrumentLive.cards.get('loss').plot.data.get('line:0:loss').length")
            page.close()
        for _ in range(5):
            start = time.perf_counter()
            socket = Socket(server, visible=_VISIBLE)
            while "charts" not in socket.take():
                pass
            spent.append(time.perf_counter() - start)
        return {"gigabytes": size / 1e9, "index_s": indexed, "index_processors_s": sum(spent_by[:4]),
                "memory_mb": memory(server), "peak_mb": peak, "points": points,
                "open_first_s": opens[0], "open_median_s": statistics.median(opens[1:]),
                "socket_median_s": statistics.median(spent)}
    finally:
        server.stop()


class Socket:
    """A browser that draws nothing."""

    def __init__(self, server: conftest.Serve, *, visible: tuple[str, ...]):
        from websockets.sync import client
        self.connection = client.connect(f"ws://127.0.0.1:{server.port}/live", max_size=None).__enter__()
        self.connection.send(json.dumps({"do": "open", "address": ""}))
        self.connection.send(json.dumps({"do": "look", "visible": visible}))

    def take(self, timeout: float = 30.0) -> dict:
        message = json.loads(self.connection.recv(timeout=timeout))
        self.connection.send(json.dumps({"do": "got", "n": message["n"]}))
        return message


def many(runs: Path, browsers: int, seconds: float) -> dict[str, float]:
    made = runs_made.healthy(runs / "shared", steps=5000, total=10_000)
    server = conftest.Serve(runs, "--port", "0", log=runs.parent / "many.log")
    waits: list[float] = []
    written: dict[int, float] = {}
    stop = threading.Event()

    def listen(socket: Socket) -> None:
        known = 0
        while not stop.is_set():
            try:
                message = socket.take(1.0)
            except TimeoutError:
                continue
            except Exception:
                if stop.is_set():  # the server has ended
                    return
                raise
            step = message.get("runs", [{}])[0].get("step", 0) if message.get("runs") else 0
            if step > known:
                now = time.perf_counter()
                # The oldest line that this message brought, which waited longest.
                waits.extend(now - written[each] for each in range(known + 1, step + 1) if each in written)
                known = step
    try:
        sockets = [Socket(server, visible=_VISIBLE) for _ in range(browsers)]
        threads = [threading.Thread(target=listen, args=(socket,), daemon=True) for socket in sockets]
        for thread in threads:
            thread.start()
        time.sleep(5)
        process = psutil.Process(server.process.pid)
        waits.clear()
        before, start = process.cpu_times(), time.perf_counter()
        step = 5001
        while time.perf_counter() - start < seconds:
            for record in runs_made.records(range(step, step + 1), total=10_000):
                made.metrics(record)
            written[step] = time.perf_counter()
            step += 1
            time.sleep(0.2)
        time.sleep(2)
        after, took = process.cpu_times(), time.perf_counter() - start
        stop.set()
        waits.sort()
        return {"browsers": browsers, "lines": len(waits), "wait_median_s": statistics.median(waits),
                "wait_99_s": waits[int(0.99 * len(waits))], "wait_max_s": waits[-1],
                "server_cpu": (after.user + after.system - before.user - before.system) / took, "memory_mb": memory(server)}
    finally:
        stop.set()
        server.stop()


_TAKE = """async (count) => {
    const points = instrumentLive.cards.get('loss').plot.data.get('line:0:loss'), keep = points.length - 1, [x] = points[keep];
    for (let i = 0; i < count; i++) {
        instrumentLive.take({charts: {loss: {option: {xAxis: {min: 1, max: x}},
                                             series: [{id: 'line:0:loss', keep, add: [[x, Math.random()]]}]}}});
        if (i % 20 === 0) await new Promise(requestAnimationFrame);
    }
}"""


def growth(runs: Path, updates: int, browser) -> dict[str, float]:
    made = runs_made.healthy(runs / "growing", steps=2000, total=updates)
    server = conftest.Serve(runs, "--port", "0", log=runs.parent / "growth.log")
    try:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(server.address)
        page.wait_for_function("() => window.instrumentLive && instrumentLive.cards.get('loss') &&"
                               " instrumentLive.cards.get('loss').plot.data.size", timeout=30_000)
        tools = page.context.new_cdp_session(page)

        def heap() -> dict[str, float]:
            tools.send("HeapProfiler.collectGarbage")
            metrics = {each["name"]: each["value"] for each in tools.send("Performance.getMetrics")["metrics"]}
            return {"heap_mb": metrics["JSHeapUsedSize"] / 1e6, "nodes": metrics["Nodes"],
                    "points": page.evaluate("[...instrumentLive.cards.values()].reduce((sum, card) => sum +"
                                            " [...card.plot.data.values()].reduce((n, p) => n + p.length, 0), 0)")}

        tools.send("Performance.enable")
        found, start = [], time.perf_counter()
        block, step = 20, 2001
        for tenth in range(11):
            found.append({"lines": step - 2001, **heap()})
            while tenth < 10 and step < 2001 + updates * (tenth + 1) // 10:
                made.metrics(*({"step": each, "time": time.time(), "loss": 2.0 + each % 7 / 10, "grad/norm": 1.0 + each % 5,
                                "learning_rate": 1e-3, "tokens_per_second": 9e4 + each % 11, "data_wait_fraction": 0.01}
                               for each in range(step, step + block)))
                step += block
                time.sleep(0.005)
            page.wait_for_function("step => instrumentLive.runs[0].step >= step", arg=step - 1, timeout=60_000)
        server_mb = memory(server)
        took, messages = time.perf_counter() - start, page.evaluate("instrumentLive.messages")
        # As many messages to the page itself, without waiting for a server, each with a new end of a curve.
        before = heap()
        for _ in range(20):
            page.evaluate(_TAKE, updates // 20)
        after = heap()
        return {"updates": updates, "seconds": took, "messages": messages, "heap_before_takes_mb": before["heap_mb"],
                "heap_after_takes_mb": after["heap_mb"], "nodes_after_takes": after["nodes"],
                "heap_first_mb": found[1]["heap_mb"], "heap_last_mb": found[-1]["heap_mb"], "nodes_first": found[1]["nodes"],
                "nodes_last": found[-1]["nodes"], "points_last": found[-1]["points"], "server_mb": server_mb,
                "heap_by_tenth_mb": [round(each["heap_mb"], 1) for each in found]}
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--metrics", type=int, default=50)
    parser.add_argument("--browsers", type=int, default=100)
    parser.add_argument("--updates", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--only", choices=["index", "many", "growth"])
    args = parser.parse_args()
    print_machine()
    from playwright.sync_api import sync_playwright
    results: dict[str, object] = {}
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        browser = playwright.chromium.launch(executable_path=conftest.CHROMIUM, args=conftest.FLAGS)
        for name, measure in (("index", lambda runs: index_and_open(runs, args.steps, args.metrics, browser)),
                              ("many", lambda runs: many(runs, args.browsers, args.seconds)),
                              ("growth", lambda runs: growth(runs, args.updates, browser))):
            if args.only in (None, name):
                runs = Path(scratch) / name / "runs"
                runs.mkdir(parents=True)
                results[name] = measure(runs)
                print(name, {key: round(value, 3) if isinstance(value, float) else value for key, value in
                             results[name].items()}, flush=True)  # type: ignore[attr-defined]
        browser.close()
    chromium = subprocess.run([str(conftest.CHROMIUM), "--version"], capture_output=True, text=True, check=False).stdout
    print_result({"chromium": chromium.strip(), **results}, "nicegui")


if __name__ == "__main__":
    main()
