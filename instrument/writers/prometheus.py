"""`PrometheusWriter`: the newest numbers of a run, for a Prometheus server to fetch.

Owns how our names become Prometheus' names and labels, which numbers are still of today, and the port. It keeps no history:
that is the server's work.
"""
from __future__ import annotations

import errno
import re
import socket
import threading
from collections.abc import Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from instrument.record import VALIDATION, Incident, Record, RunInfo
from instrument.writers.base import Writer
from instrument.writers.extras import require

_PORTS_TRIED = 20
_OWN_LABELS = ("metric", "object", "alarm", "run")
# Families that the writer itself has, with the suffixes that Prometheus' formats add to names.
_RESERVED = {f"instrument_{name}" for name in (
    "step", "validation_step", "last_record_time_seconds", "run_info", "run", "open_incidents",
    "alarms", "alarms_total", "alarms_created")}


class PrometheusWriter(Writer):
    """Serves the newest record at `http://HOST:PORT/metrics`, from a thread of its own.

    A metric's name has up to three parts, and the first two make the name of a gauge: `grad/norm/head.weight` is
    `instrument_grad_norm{metric="grad/norm",object="head.weight"}`, and `grad/norm` the same with an empty `object`, which
    Prometheus takes for none. Characters that Prometheus does not allow become `_`; the labels have the name as it is, so
    that two metrics are always two series. NaN and infinities are values for Prometheus too.

    The gauges show the newest step: what its records lack is gone, and no old number stays. What begins with `val/` stays
    until the next validation. Beside them are

    - `instrument_step` and `instrument_validation_step`: the steps that the gauges are of;
    - `instrument_last_record_time_seconds`: when the newest record was made, in seconds since 1970: an alert on it finds
      a training that hangs;
    - `instrument_alarms_total{alarm=...}`: incidents that began, since the writer was made; and
      `instrument_open_incidents{alarm=...}`: those that have not ended;
    - `instrument_run_info{run=...}`: always 1; its label is the name of the run.

    Histograms, texts and hyper-parameters are left out. The port is opened by the first record and freed by `close`. Where
    it is in use, the next free one is taken and printed.

    Args:
        port: The port, or 0 for any that is free.
        host: The address to listen at. By default only this machine can ask; `0.0.0.0` lets every machine, and whoever
            can reach it reads the numbers.
        labels: Labels that each series gets, such as `{"job_name": "gpt"}`.

    Attributes:
        port: The port that is served, or was last; None before the first record.

    Raises:
        ValueError: `port` is no port, or `labels` has a name that Prometheus does not allow or that the writer uses itself.
        ImportError: At the first record: prometheus-client is not installed.
        OSError: At the first record: none of the ports is free, or the address is not this machine's.

    Examples:
        >>> monitor = TrainingMonitor("runs/first", writers=[PrometheusWriter(port=9464)])        # doctest: +SKIP
    """

    def __init__(self, *, port: int = 9464, host: str = "127.0.0.1", labels: Mapping[str, str] | None = None):
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
            raise ValueError(f"port must be a number from 0 to 65535, but it is {port!r}. Use 0 for any free one.")
        self.labels = {name: str(value) for name, value in (labels or {}).items()}
        for name in self.labels:
            if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_]*", name) or name in _OWN_LABELS:
                raise ValueError(f"labels must have names of letters, digits and _ other than {', '.join(_OWN_LABELS)}, but "
                                 f"one is {name!r}. Rename it.")
        self.host = host
        self.port: int | None = None
        self._wanted = port
        self._gauges = _Gauges(self.labels)
        self._server: _Server | None = None

    def start(self, run: RunInfo) -> None:
        self._gauges.run = run.name

    def write(self, record: Record) -> None:
        self._gauges.update(record)
        if self._server is None:
            self._server = self._open()

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def _open(self) -> _Server:
        prometheus = require("prometheus_client", "prometheus")
        # A registry of our own: neither the user's metrics nor a second writer's can clash with ours.
        registry = prometheus.CollectorRegistry()
        registry.register(self._gauges)
        app = prometheus.make_wsgi_app(registry)
        first = self.port or self._wanted  # once more the port that the server of Prometheus knows by now
        last = min(first + _PORTS_TRIED - 1, 65535) if first else 0
        for port in range(first, last + 1):
            try:
                server = _Server(self.host, port, app)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            self.port = server.server_port
            if self.port != self._wanted:
                reason = (f" (port {self._wanted} is in use: a server of Prometheus that fetches from it sees another "
                          "process; pass each job a `port` of its own)") if self._wanted else ""
                print(f"Prometheus metrics are at http://{self.host}:{self.port}/metrics{reason}", flush=True)
            return server
        raise OSError(errno.EADDRINUSE, f"the ports {first} to {last} of {self.host} are all in use; pass another `port`, "
                                        "or 0 for any that is free")


class _Gauges:
    """What is served now. prometheus-client calls `collect` for each request, from the server's threads."""

    def __init__(self, labels: Mapping[str, str]):
        self.run = ""
        self._labels = labels
        # Each is replaced as a whole and never changed, so that a request needs no lock and never sees half of a record.
        self._training: tuple[int, Mapping[str, float]] | None = None
        self._validation: tuple[int, Mapping[str, float]] | None = None
        self._time: float | None = None
        self._begun: Mapping[str, int] = {}
        self._open: frozenset[tuple[str, str, str, int]] = frozenset()

    def update(self, record: Record) -> None:
        validation = {name: value for name, value in record.values.items() if name.startswith(VALIDATION)}
        training = {name: value for name, value in record.values.items() if not name.startswith(VALIDATION)}
        if training:
            self._training = _newest(self._training, record.step, training)
        if validation:
            self._validation = _newest(self._validation, record.step, validation)
        for incident in record.alarms:
            self._note(incident)
        self._time = record.time

    def _note(self, incident: Incident) -> None:
        which = incident.alarm, incident.metric, incident.where, incident.first_step
        if incident.state == "begin":
            self._begun = {**self._begun, incident.alarm: self._begun.get(incident.alarm, 0) + 1}
            self._open |= {which}
        else:
            self._open -= {which}

    def describe(self) -> Iterable[Any]:
        return ()  # or prometheus-client calls `collect` when this is registered

    def collect(self) -> Iterable[Any]:
        core = require("prometheus_client.core", "prometheus")
        own = tuple(self._labels)
        values = tuple(self._labels.values())

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return core.GaugeMetricFamily(f"instrument_{name}", text, labels=own + labels)

        training, validation, begun, still_open = self._training, self._validation, self._begun, self._open
        info = gauge("run_info", "Name of the run; always 1.", ("run",))
        info.add_metric((*values, self.run), 1.0)
        yield info
        if self._time is not None:
            family = gauge("last_record_time_seconds", "When the newest record was made, in seconds since 1970.")
            family.add_metric(values, self._time)
            yield family
        for name, what, newest in (("step", "training", training), ("validation_step", "validation", validation)):
            if newest is not None:
                family = gauge(name, f"Step of the newest {what} metrics.")
                family.add_metric(values, newest[0])
                yield family
        counter = core.CounterMetricFamily("instrument_alarms", "Incidents that began.", labels=(*own, "alarm"))
        incidents = gauge("open_incidents", "Incidents that have begun and not ended.", ("alarm",))
        for alarm, count in begun.items():
            counter.add_metric((*values, alarm), count)
            incidents.add_metric((*values, alarm), sum(alarm == each for each, *_ in still_open))
        yield counter
        yield incidents
        families: dict[str, Any] = {}
        for newest in (training, validation):
            for name, value in (newest or (0, {}))[1].items():
                metric, of = split_name(name)
                full = prometheus_name(metric)
                if full not in families:
                    families[full] = core.GaugeMetricFamily(full, f"Metrics of instrument such as {metric}",
                                                            labels=(*own, "metric", "object"))
                families[full].add_metric((*values, metric, of), value)
        yield from families.values()


def _newest(now: tuple[int, Mapping[str, float]] | None, step: int,
            values: Mapping[str, float]) -> tuple[int, Mapping[str, float]]:
    return (step, {**now[1], **values}) if now is not None and now[0] == step else (step, values)


def split_name(name: str) -> tuple[str, str]:
    """The labels `metric` and `object` of a metric.

    Examples:
        >>> split_name("grad/norm/head.weight"), split_name("loss")
        (('grad/norm', 'head.weight'), ('loss', ''))
    """
    parts = name.split("/", 2)
    # An empty third part stays where it is, or "a/b/" would be what "a/b" is.
    return (f"{parts[0]}/{parts[1]}", parts[2]) if len(parts) == 3 and parts[2] else (name, "")


def prometheus_name(metric: str) -> str:
    """The name of the gauge for a label `metric`.

    Examples:
        >>> prometheus_name("grad/norm"), prometheus_name("loss/mse 2"), prometheus_name("step")
        ('instrument_grad_norm', 'instrument_loss_mse_2', 'instrument_step_')
    """
    name = "instrument_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
    return name + "_" if name in _RESERVED else name


class _QuietHandler(WSGIRequestHandler):
    timeout = 10.0  # seconds; a client that says nothing does not keep its thread for ever

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Say nothing: each request would be a line on stderr."""


class _Server(ThreadingMixIn, WSGIServer):
    """A WSGI server in a thread. It binds in the constructor, and raises OSError where it cannot.

    `prometheus_client.start_http_server` returns what is needed to stop it only since 0.20, and the port stays taken while a
    process lives that was forked while it was open, as workers of a dataset are.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, app: Any):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _QuietHandler)
        self.set_app(app)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True,
                                        name="instrument-prometheus")
        self._thread.start()

    def server_bind(self) -> None:
        # The base class asks the resolver for the host's full name, which can take seconds on a cluster; nobody reads it.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away in the middle of an answer."""

    def stop(self) -> None:
        """Stop answering and free the port, also where a forked process still holds the socket."""
        if self._thread.is_alive():  # it is not in a forked process, where `shutdown` would wait for it for ever
            self.shutdown()
            self._thread.join()
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # some systems refuse it for a socket that listens; closing it frees the port there as well
        self.server_close()
