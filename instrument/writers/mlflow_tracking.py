"""`MlflowWriter`: MLflow tracking, through MLflow's own client."""
from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import orjson

from instrument.record import Incident, Record, RunInfo
from instrument.writers import clients
from instrument.writers.base import Writer
from instrument.writers.extras import require

_BATCH = 1000  # metrics in one request, MLflow's own limit
_PARAMS = 100  # likewise
_TAG = 5000  # characters
# Letters and digits of any alphabet are taken, and names must not look like another path than they are.
_REFUSED = re.compile(r"[^\w.\- /]|^/|^\.\.|^\.(?=/|$)|(?<=/)\.\.?(?=/|$)|(?<=/)/|/$")
INFINITE = "instrument.infinite"


class MlflowWriter(Writer):
    """Logs the numbers of each record to one MLflow run, by batches.

    By default the run is in `mlflow.db`, an SQLite database in the run directory (or in the working directory where there
    is none), and its artifacts beside it in `mlartifacts`; `mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db` shows it.
    MLflow's file store is refused: it cannot hold `grad/norm` and `grad/norm/head.weight` at once, and newer releases of
    MLflow refuse it as well.

    NaN is kept. MLflow's database makes 1.8e308 of infinities, a number that nobody measured, so they are left out, and the
    tag `instrument.infinite` says of which metrics: `grad/norm: inf at step 7, 3 times`. Hyper-parameters become params;
    where a resumed run changes one, which MLflow refuses, the tag `instrument.changed` has it. Texts become artifacts,
    `texts/<name>/<step>.txt`. The tag `alarm.<alarm>` has that alarm's last message. Histograms are left out. In names,
    characters that MLflow refuses become `_`, and a checksum follows.

    Numbers are held back until there are 1,000, or `flush` or `close` is called. Where MLflow refuses them, they are lost,
    and the error is raised. MLflow needs about half a millisecond for each number: with 1,000 metrics, record every tenth
    step or fewer.

    `close` ends the run with the status FINISHED; a run whose process was killed stays RUNNING. A resumed run goes on in
    the same MLflow run; its id is in `clients.json` of the run directory. MLflow's reports of use are switched off, where
    this writer imports it first.

    Args:
        tracking_uri: A database or a server, such as `http://127.0.0.1:5000`. By default what `MLFLOW_TRACKING_URI` says,
            and else the database in the run directory.
        experiment: Name of the experiment; made where it does not exist.
        run_name: By default the name of the run directory.

    Attributes:
        run_id: MLflow's id of the run; None before the first record.

    Raises:
        ValueError: `tracking_uri` is a file store. Also from `write`, where `MLFLOW_TRACKING_URI` is.
        ImportError: At the first record: mlflow, or what its database needs, is not installed.

    Examples:
        >>> monitor = TrainingMonitor("runs/first", writers=[MlflowWriter()])                     # doctest: +SKIP
    """

    def __init__(self, *, tracking_uri: str | None = None, experiment: str = "instrument", run_name: str | None = None):
        if tracking_uri is not None:
            _refuse_file_store(tracking_uri)
        self.tracking_uri, self.experiment, self.run_name = tracking_uri, experiment, run_name
        self.run_id: str | None = None
        self._info = RunInfo()
        self._client: Any = None
        self._held: list[Any] = []
        self._infinite: dict[str, tuple[str, int, int]] = {}  # metric: what it was, at which step first, how often
        self._infinite_told = 0

    def start(self, run: RunInfo) -> None:
        self._info = run

    def write(self, record: Record) -> None:
        client = self._client = self._client or self._open()
        metric = require("mlflow.entities", "mlflow").Metric
        for name, value in record.values.items():
            if math.isinf(value):
                what, first, times = self._infinite.get(name, (str(value), record.step, 0))
                self._infinite[name] = what, first, times + 1
            else:
                self._held.append(metric(accepted(name), float(value), round(record.time * 1000), record.step))
        for name, text in record.texts.items():
            client.log_text(self.run_id, text, f"texts/{accepted(name)}/{record.step:08}.txt")
        for incident in record.alarms:
            self._report(incident)
        if len(self._held) >= _BATCH:
            self._send()

    def flush(self) -> None:
        if self._client is not None:
            self._send()
            self._tell_infinite()

    def close(self) -> None:
        if self._client is None:
            return
        try:
            self.flush()
            self._client.set_terminated(self.run_id, "FINISHED")
        finally:
            self._client = None

    def _send(self) -> None:
        held, self._held = self._held, []
        for start in range(0, len(held), _BATCH):
            self._client.log_batch(self.run_id, metrics=held[start:start + _BATCH])

    def _tell_infinite(self) -> None:
        count = sum(times for _, _, times in self._infinite.values())
        if count == self._infinite_told:
            return
        told = "; ".join(f"{name}: {what} at step {first}" + (f", {times} times" if times > 1 else "")
                         for name, (what, first, times) in self._infinite.items())
        self._client.set_tag(self.run_id, INFINITE, told if len(told) <= _TAG else f"{told[:_TAG - 3]}...")
        self._infinite_told = count

    def _report(self, incident: Incident) -> None:
        self._client.set_tag(self.run_id, accepted(f"alarm.{incident.alarm}"), str(incident)[:_TAG])

    def _open(self) -> Any:
        directory = self._info.directory or Path.cwd()
        database = f"sqlite:///{directory / 'mlflow.db'}"
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or database
        _refuse_file_store(uri)
        with clients.environment(MLFLOW_DISABLE_TELEMETRY="true"):
            mlflow = require("mlflow", "mlflow")
        if uri == database:
            require("sqlalchemy", "mlflow")  # mlflow-skinny comes without, and its own message does not say how to get it
            require("alembic", "mlflow")
            directory.mkdir(parents=True, exist_ok=True)
        client = mlflow.MlflowClient(tracking_uri=uri)
        run_id = self.run_id or clients.stored_id(self._info, "mlflow")
        if run_id is None:
            run_id = client.create_run(
                self._experiment(client, (directory / "mlartifacts").as_uri() if uri == database else None),
                run_name=self.run_name or self._info.name).info.run_id
        else:
            client.update_run(run_id, status="RUNNING")
        self.run_id = run_id
        clients.store_id(self._info, "mlflow", run_id)
        self._log_params(client)
        return client

    def _experiment(self, client: Any, artifacts: str | None) -> str:
        found = client.get_experiment_by_name(self.experiment)
        return found.experiment_id if found else client.create_experiment(self.experiment, artifact_location=artifacts)

    def _log_params(self, client: Any) -> None:
        """Log what is new; MLflow lets no param change."""
        entities = require("mlflow.entities", "mlflow")
        there = client.get_run(self.run_id).data.params
        given = {accepted(name): str(value) for name, value in clients.hyper_parameters(self._info).items()}
        new = [entities.Param(name, value) for name, value in given.items() if name not in there]
        for start in range(0, len(new), _PARAMS):
            client.log_batch(self.run_id, params=new[start:start + _PARAMS])
        # MLflow cuts long values, so that one that begins like what is there has not changed.
        changed = {name: value for name, value in given.items() if not value.startswith(there.get(name, value))}
        if changed:
            client.set_tag(self.run_id, "instrument.changed", orjson.dumps(changed).decode()[:_TAG])


def accepted(name: str) -> str:
    """The name that MLflow has for one of ours: the same, but for characters that it refuses.

    Examples:
        >>> accepted("grad/norm/head.weight"), accepted("loss:ä")
        ('grad/norm/head.weight', 'loss_ä-f7b05237')
    """
    return clients.accepted_name(name, refused=_REFUSED, longest=250)


def _refuse_file_store(uri: str) -> None:
    if urlparse(uri).scheme in ("", "file") and uri != "databricks":
        raise ValueError(f"tracking_uri must be a database or a server, but {uri!r} is a file store, which cannot hold a "
                         "metric `loss` beside `loss/part`. Use sqlite:///FILE, or leave it out for a database in the run "
                         "directory.")
