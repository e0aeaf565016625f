"""`PrometheusWriter`: what a server of Prometheus is answered, by prometheus-client's own parsers."""
import math
import os
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest

from instrument.record import Incident, Record, RunInfo
from instrument.writers import PrometheusWriter
from instrument.writers.prometheus import prometheus_name, split_name

pytest.importorskip("prometheus_client", reason="needs prometheus-client: pip install prometheus-client")
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families as parse_text  # noqa: E402

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def fetch(writer, accept="text/plain"):
    request = urllib.request.Request(f"http://127.0.0.1:{writer.port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def samples(writer):
    """{(name, labels as a sorted tuple): value}, and the same from the OpenMetrics answer."""
    read = []
    for accept, parse in (("text/plain", parse_text), (OPENMETRICS, parse_openmetrics)):
        found = {}
        for family in parse(fetch(writer, accept)):
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert key not in found, f"{key} occurs twice, and Prometheus would take nothing of this answer"
                found[key] = sample.value
        read.append(found)
    text, openmetrics = read
    assert {key: repr(value) for key, value in text.items()} == {key: repr(value) for key, value in openmetrics.items()}
    return text


def metrics(writer):
    """{our name: value} of all gauges that are metrics of ours."""
    found = {}
    for (_, labels), value in samples(writer).items():
        labels = dict(labels)
        if "metric" in labels:
            found["/".join(filter(None, (labels["metric"], labels["object"])))] = value
    return found


@pytest.fixture
def writer():
    with PrometheusWriter(port=0) as writer:
        yield writer


def test_a_metric_is_a_gauge_with_the_rest_of_its_name_as_a_label(writer):
    writer.start(RunInfo(name="first"))
    writer.write(Record(10, 1735387200.125, {"loss": 2.5, "grad/norm": 0.75, "grad/norm/blocks.0.weight": 1e-30}))
    assert samples(writer) == {
        ("instrument_loss", (("metric", "loss"), ("object", ""))): 2.5,
        ("instrument_grad_norm", (("metric", "grad/norm"), ("object", ""))): 0.75,
        ("instrument_grad_norm", (("metric", "grad/norm"), ("object", "blocks.0.weight"))): 1e-30,
        ("instrument_step", ()): 10.0,
        ("instrument_last_record_time_seconds", ()): 1735387200.125,
        ("instrument_run_info", (("run", "first"),)): 1.0,
    }


def test_values_that_are_not_finite_are_served(writer):
    writer.write(Record(1, 0.0, {"a": math.nan, "b": math.inf, "c": -math.inf}))
    served = metrics(writer)
    assert math.isnan(served["a"]) and served["b"] == math.inf and served["c"] == -math.inf


def test_no_two_names_become_one_series(writer):
    names = ["grad/norm/a", "grad norm/a", "grad_norm/a", "grad/norm_a", "grad/norm/a/b", "loss/ä", "loss/ö", "loss/ ", "损失",
             'quote"back\\slash\nline', "1", "step", "alarms_total", "run_info", "validation_step", "Loss", "loss", "a/b",
             "last_record_time_seconds", "open_incidents", "alarms", "alarms_created", "run", "x_total", "x_info", "x"]
    values = {name: float(i) for i, name in enumerate(names)}
    writer.write(Record(7, 0.0, values))
    assert metrics(writer) == values
    assert samples(writer)["instrument_step", ()] == 7.0


def test_empty_parts_of_a_name_stay_apart(writer):
    names = ["a/b", "a/b/", "a/b//", "a//b", "/a/b", "", "/", "//"]
    writer.write(Record(1, 0.0, {name: float(i) for i, name in enumerate(names)}))
    found = {labels: value for (_, labels), value in samples(writer).items() if labels and labels[0][0] == "metric"}
    assert sorted(found.values()) == [float(i) for i in range(len(names))]
    for name in names:
        metric, of = split_name(name)
        assert name == (f"{metric}/{of}" if of else metric)


def test_names_are_what_prometheus_allows():
    assert prometheus_name("loss/mse 2é") == "instrument_loss_mse_2_"
    assert prometheus_name("step") == "instrument_step_"


def test_what_the_newest_step_lacks_is_gone(writer):
    writer.write(Record(1, 0.0, {"loss": 1.0, "activation/rms/a": 3.0}))
    writer.write(Record(2, 1.0, {"loss": 2.0}))
    assert metrics(writer) == {"loss": 2.0}


def test_records_of_one_step_are_shown_together(writer):
    writer.write(Record(2, 1.0, {"loss": 2.0}))
    writer.write(Record(2, 1.0, {"mine": 3.0}))
    assert metrics(writer) == {"loss": 2.0, "mine": 3.0}


def test_validation_stays_until_the_next_one(writer):
    writer.write(Record(1, 0.0, {"loss": 1.0}))
    writer.write(Record(1, 0.5, {"val/loss": 1.5, "val/accuracy": 0.5}))
    writer.write(Record(2, 1.0, {"loss": 0.5}))
    assert metrics(writer) == {"loss": 0.5, "val/loss": 1.5, "val/accuracy": 0.5}
    assert samples(writer)["instrument_validation_step", ()] == 1.0
    writer.write(Record(2, 1.5, {"val/loss": 1.25}))
    assert metrics(writer) == {"loss": 0.5, "val/loss": 1.25}
    assert samples(writer)["instrument_validation_step", ()] == 2.0


def test_a_record_without_numbers_hides_none(writer):
    writer.write(Record(1, 0.0, {"loss": 1.0}))
    writer.write(Record(2, 1.0, {}, texts={"sample": "once upon a time"}))
    assert metrics(writer) == {"loss": 1.0}
    assert samples(writer)["instrument_last_record_time_seconds", ()] == 1.0


def test_alarms_are_counted_and_open_incidents_shown(writer):
    def incident(alarm, state, first, where=""):
        return Incident(alarm, state, first, first, 1, "message", where=where)

    def counts():
        found = samples(writer)
        return [found[f"instrument_{name}", (("alarm", "NonFinite"),)] for name in ("alarms_total", "open_incidents")]

    writer.write(Record(3, 0.0, {}, alarms=(incident("NonFinite", "begin", 3, "a"), incident("NonFinite", "begin", 3, "b"))))
    assert counts() == [2.0, 2.0]
    writer.write(Record(4, 0.0, {}, alarms=(incident("NonFinite", "end", 3, "a"),)))
    assert counts() == [2.0, 1.0]
    # One that began in an earlier process.
    writer.write(Record(5, 0.0, {}, alarms=(incident("NonFinite", "end", 1, "c"),)))
    assert counts() == [2.0, 1.0]
    assert ("instrument_alarms_total", (("alarm", "LossSpike"),)) not in samples(writer)


def test_labels_are_on_every_series():
    with PrometheusWriter(port=0, labels={"team": "a \"b\"\n"}) as writer:
        writer.write(Record(1, 0.0, {"loss": 1.0, "val/loss": 1.0}, alarms=(Incident("A", "begin", 1, 1, 1, ""),)))
        found = samples(writer)
        assert len(found) == 8
        assert all(dict(labels)["team"] == "a \"b\"\n" for _, labels in found)


@pytest.mark.parametrize("name", ["metric", "object", "alarm", "run", "1a", "a-b", "", "_a", "ä"])
def test_a_label_that_cannot_be_is_refused(name):
    with pytest.raises(ValueError, match="labels must have names"):
        PrometheusWriter(labels={name: "x"})


@pytest.mark.parametrize("port", [-1, 65536, "9464", True, None])
def test_a_port_that_cannot_be_is_refused(port):
    with pytest.raises(ValueError, match="port must be a number from 0 to 65535"):
        PrometheusWriter(port=port)


def test_making_a_writer_takes_no_port():
    writer = PrometheusWriter(port=0)
    writer.start(RunInfo())
    writer.flush()
    writer.close()
    assert writer.port is None


def test_a_port_in_use_makes_it_take_the_next_and_say_so(capsys):
    with PrometheusWriter(port=0) as first:
        first.write(Record(1, 0.0, {"loss": 1.0}))
        capsys.readouterr()
        with PrometheusWriter(port=first.port) as second:
            second.write(Record(1, 0.0, {"loss": 2.0}))
            assert first.port < second.port <= first.port + 19
            assert capsys.readouterr().out == (
                f"Prometheus metrics are at http://127.0.0.1:{second.port}/metrics (port {first.port} is in use: a server of "
                "Prometheus that fetches from it sees another process; pass each job a `port` of its own)\n")
            assert metrics(first) == {"loss": 1.0} and metrics(second) == {"loss": 2.0}


def test_no_free_port_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr("instrument.writers.prometheus._PORTS_TRIED", 1)
    with PrometheusWriter(port=0) as first:
        first.write(Record(1, 0.0, {}))
        with PrometheusWriter(port=first.port) as second, pytest.raises(OSError, match="pass another `port`"):
            second.write(Record(1, 0.0, {}))


def test_an_address_of_another_machine_is_an_error():
    with PrometheusWriter(port=0, host="192.0.2.1") as writer, pytest.raises(OSError, match="assign"):
        writer.write(Record(1, 0.0, {}))


def test_closing_frees_the_port_and_a_later_record_takes_it_again():
    with PrometheusWriter(port=0) as writer:
        writer.write(Record(1, 0.0, {"loss": 1.0}))
        port = writer.port
        before = threading.active_count()
        writer.close()
        writer.close()
        assert threading.active_count() == before - 1
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # answers of before may still linger
            free.bind(("127.0.0.1", port))
        writer.write(Record(2, 0.0, {"loss": 2.0}))
        assert writer.port == port and metrics(writer) == {"loss": 2.0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_neither_keeps_the_port_nor_hangs():
    # In a process of its own, since a fork with MindSpore's threads in it is another matter.
    program = """
import os, signal, socket
from instrument.record import Record
from instrument.writers import PrometheusWriter
writer = PrometheusWriter(port=0)
writer.write(Record(1, 0.0, {"loss": 1.0}))
read, write = os.pipe()
child = os.fork()
if child == 0:  # as a worker of a dataset, which inherits the socket
    signal.alarm(60)
    os.read(read, 1)
    writer.close()
    os._exit(7)
writer.close()
try:
    socket.create_connection(("127.0.0.1", writer.port), 5)
    print("connected")
except ConnectionRefusedError:
    print("refused")
again = PrometheusWriter(port=writer.port)
again.write(Record(2, 0.0, {}))
print(again.port == writer.port)
again.close()
os.write(write, b"x")
print(os.WEXITSTATUS(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("Prometheus metrics are at")]
    assert lines == ["refused", "True", "7"], done.stderr


def test_neither_the_users_metrics_nor_the_clients_own_are_served(writer):
    import prometheus_client

    gauge = prometheus_client.Gauge("instrument_loss", "The user's own, of the name that the writer has too.")
    try:
        gauge.set(5.0)
        writer.write(Record(1, 0.0, {"loss": 1.0}))
        assert metrics(writer) == {"loss": 1.0}
        assert not any(name.startswith("python_") for name, _ in samples(writer))
        assert "instrument_loss 5.0" in prometheus_client.generate_latest().decode()
    finally:
        prometheus_client.REGISTRY.unregister(gauge)


def test_a_request_while_records_come_sees_one_whole_record(writer):
    writer.write(Record(1, 0.0, dict.fromkeys("abcdefgh", 1.0)))
    stop = threading.Event()

    def write():
        step = 1
        while not stop.is_set():
            step += 1
            writer.write(Record(step, 0.0, dict.fromkeys("abcdefgh", float(step))))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = [samples_of_one(writer) for _ in range(20)]
    finally:
        stop.set()
        thread.join()
    assert all(len(values) == 1 for values in seen) and len({max(values) for values in seen}) > 1


def samples_of_one(writer):
    return {sample.value for family in parse_text(fetch(writer)) for sample in family.samples
            if "metric" in sample.labels or sample.name == "instrument_step"}


def test_a_client_that_goes_away_is_no_noise(writer, capfd):
    writer.write(Record(1, 0.0, {f"m/{i}": 1.0 for i in range(2000)}))
    capfd.readouterr()
    with socket.create_connection(("127.0.0.1", writer.port), 10) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close resets the connection
    with socket.create_connection(("127.0.0.1", writer.port), 10) as client:  # and one that speaks no HTTP is told so
        client.sendall(b"nonsense\r\n\r\n")
        assert b"400" in client.makefile("rb").read()
    assert len(metrics(writer)) == 2000
    assert capfd.readouterr() == ("", "")


def test_a_missing_client_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with PrometheusWriter(port=0) as writer, pytest.raises(ImportError, match=r"mindspore-instrument\[prometheus\]"):
        writer.write(Record(1, 0.0, {}))


def test_the_client_is_imported_by_the_first_record():
    program = ("import sys; from instrument.writers import PrometheusWriter; from instrument.record import Record\n"
               "writer = PrometheusWriter(port=0); print('prometheus_client' in sys.modules)\n"
               "writer.write(Record(1, 0.0, {})); print('prometheus_client' in sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert [lines[0], lines[-1]] == ["False", "True"], done.stderr  # and it ends, though the writer was not closed
    assert done.returncode == 0
