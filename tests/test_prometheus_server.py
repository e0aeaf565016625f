"""A real Prometheus, with the documented configuration, fetches what the ranks serve. Skipped where none is installed."""
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from instrument.record import Record, RunInfo
from instrument.writers import PrometheusWriter

EXAMPLES = Path(__file__).parents[1] / "examples"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(name, targets, directory, port):
    """A server of Prometheus with this configuration of the examples, but for the machines and the time it waits."""
    text = (EXAMPLES / name).read_text("utf-8").replace("scrape_interval: 15s", "scrape_interval: 1s")
    config, replaced = re.subn(r"targets: \[.*?\]", f"targets: {json.dumps(targets)}", text)
    assert replaced == 1
    directory.mkdir()
    file = directory / "prometheus.yml"
    file.write_text(config, "utf-8")
    subprocess.run(["promtool", "check", "config", str(file)], check=True, capture_output=True)
    return subprocess.Popen(["prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}",
                             f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ask(port, query, wanted):
    """`[(labels, value)]` as soon as there are so many, for 20 seconds at most."""
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    deadline, found = time.monotonic() + 20, []
    while len(found) != wanted and time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:  # it is still starting
            continue
    return [(each["metric"], float(each["value"][1])) for each in found]


@pytest.mark.skipif(not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs a Prometheus server")
def test_a_server_and_one_above_it_have_the_numbers_of_all_ranks(tmp_path):
    pytest.importorskip("prometheus_client")
    writers = [PrometheusWriter(port=free_port(), labels={"rank": str(rank)}) for rank in (0, 1)]
    servers, ports = [], [free_port(), free_port()]
    try:
        for rank, writer in enumerate(writers):
            writer.start(RunInfo("gpt"))
            values = {"step_time": 0.5 + rank} if rank else {"loss": 2.5, "step_time": 0.5, "rank/argmax/loss": 1.0}
            writer.write(Record(7, 1735387200.0, values))
        targets = [f"127.0.0.1:{writer.port}" for writer in writers]
        servers.append(serve("prometheus.yml", targets, tmp_path / "rack", ports[0]))
        servers.append(serve("prometheus-above.yml", [f"127.0.0.1:{ports[0]}"], tmp_path / "above", ports[1]))
        assert [value for _, value in ask(ports[0], "instrument_loss", 1)] == [2.5]
        assert {labels["rank"]: value for labels, value in ask(ports[0], "max by (rank) (instrument_step_time)", 2)} \
            == {"0": 0.5, "1": 1.5}
        assert [value for _, value in ask(ports[0], 'instrument_rank_argmax{object="loss"}', 1)] == [1.0]
        assert len(ask(ports[0], "time() - instrument_last_record_time_seconds > 600", 2)) == 2
        assert {labels["rank"]: value for labels, value in ask(ports[1], "instrument_step_time", 2)} == {"0": 0.5, "1": 1.5}
    finally:
        for server in servers:
            server.terminate()
            server.wait(timeout=20)
        for writer in writers:
            writer.close()
