"""`WandbWriter`: Weights & Biases, through its own client."""
from __future__ import annotations

import html
import os
import secrets
from typing import Any

from instrument.record import Incident, Record, RunInfo
from instrument.writers import clients
from instrument.writers.base import Writer
from instrument.writers.extras import require

STEP = "instrument/step"
_MODES = ("online", "offline", "disabled")


class WandbWriter(Writer):
    """Logs each record as one row of a Weights & Biases run, whose step is the record's.

    Records of one step, such as a training and a validation record, make one row, so a row is complete, and saved, when
    the next step comes or the writer is closed. NaN and infinities are kept. Histograms are shown with one bin a power of two,
    and what is not finite in them counts in `<name>/nonfinite`; texts are shown as they are. An alarm sends an alert when
    it begins, and its last message is in the run's summary as `alarms/<alarm>`. Hyper-parameters become the config.

    By default nothing leaves the machine: the run is a folder `wandb/offline-run-*` of the run directory, or of the working
    directory where there is none, and `wandb sync FOLDER` uploads it. In this mode the client's own reports of errors and of
    use are switched off as well, where this writer starts the client.

    A resumed run keeps its id, which is in `clients.json` of the run directory. Offline it gets one folder a process (and
    one for each time that it was closed); `wandb sync --append` joins the later ones to the first.

    Where `wandb.init` has been called in this process, the rows go to that run, which is not finished here. Then they have
    its step numbers, and the record's step is their axis, `instrument/step`; hyper-parameters are added to its config. While
    this writer's run is open, `wandb.init` returns that one, and finishing it makes the writer fail: call `wandb.init`
    before training, or with `reinit="create_new"`.

    The client takes tens of milliseconds to log 1,000 numbers, and seconds to start.

    Args:
        project: The project.
        name: What W&B shows as the run's name; by default the name of the run directory.
        mode: `online`, `offline` or `disabled`. By default what `WANDB_MODE` says, and `offline` where it is not set.
            `online` needs `wandb login` beforehand.
        entity: The user or team that the project belongs to; by default the one that W&B knows.

    Attributes:
        run: The W&B run while it is open, None otherwise.

    Raises:
        ValueError: `mode` is none of these. From `write`: the step of a record is below that of the last one; W&B would
            drop the row.
        ImportError: At the first record: wandb is not installed.

    Examples:
        >>> monitor = TrainingMonitor("runs/first", writers=[WandbWriter(project="gpt")])         # doctest: +SKIP
    """

    def __init__(self, *, project: str = "instrument", name: str | None = None, mode: str | None = None,
                 entity: str | None = None):
        clients.check_mode(mode, _MODES, variable="WANDB_MODE")
        self.project, self.name, self.mode, self.entity = project, name, mode, entity
        self.run: Any = None
        self._info = RunInfo()
        self._id: str | None = None
        self._ours = True
        self._last_step = 0
        self._defined: set[str] = set()

    def start(self, run: RunInfo) -> None:
        self._info = run

    def write(self, record: Record) -> None:
        run = self.run = self.run or self._open()
        if self._ours and record.step < self._last_step:
            raise ValueError(f"step {record.step} comes after step {self._last_step}, and W&B drops rows whose step is below "
                             "that of the last one. Give the writer of a training that begins anew a new run.")
        row = self._row(record)
        if row and self._ours:
            run.log(row, step=record.step)
            self._last_step = record.step
        elif row:
            self._give_axis(row)
            run.log({**row, STEP: record.step})
        for incident in record.alarms:
            self._report(incident)

    def close(self) -> None:
        run, self.run = self.run, None
        if run is not None and self._ours:
            run.finish()

    def _row(self, record: Record) -> dict[str, Any]:
        wandb = require("wandb", "wandb")
        row: dict[str, Any] = dict(record.values)
        for name, counts in record.histograms.items():
            finite, edges, nonfinite = clients.trimmed(counts)
            if len(finite):
                row[name] = wandb.Histogram(np_histogram=(finite, edges))
            if nonfinite:
                row[f"{name}/nonfinite"] = nonfinite
        for name, text in record.texts.items():
            row[name] = wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        return row

    def _report(self, incident: Incident) -> None:
        self.run.summary[f"alarms/{incident.alarm}"] = str(incident)
        if incident.state == "begin":
            wandb = require("wandb", "wandb")
            # W&B keeps alerts of one title a minute apart; ours come once an incident already.
            self.run.alert(title=incident.alarm, text=str(incident), level=wandb.AlertLevel.WARN, wait_duration=0)

    def _give_axis(self, row: dict[str, Any]) -> None:
        """Have W&B draw these metrics, in a run with step numbers of its own, against our step."""
        if not self._defined:
            self.run.define_metric(STEP, hidden=True)
        for name in row.keys() - self._defined:
            if "*" not in name:  # a pattern to define_metric
                self.run.define_metric(name, step_metric=STEP)
        self._defined |= row.keys()

    def _open(self) -> Any:
        mode = self.mode or os.environ.get("WANDB_MODE") or "offline"
        # wandb's service reports errors and use to W&B, offline too, and waits for the network when it ends.
        quiet = {} if mode == "online" else {"WANDB_ERROR_REPORTING": "false"}
        with clients.environment(**quiet):
            wandb = require("wandb", "wandb")
            self._ours = wandb.run is None
            if self._ours:
                run = self._init(wandb, mode)
            else:
                run = wandb.run
                self._defined = set()
        run.config.update(clients.hyper_parameters(self._info), allow_val_change=True)
        return run

    def _init(self, wandb: Any, mode: str) -> Any:
        info = self._info
        known = self._id or clients.stored_id(info, "wandb")
        run_id = known or secrets.token_hex(4)
        directory = None if info.directory is None else str(info.directory)
        if info.directory is not None:
            info.directory.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=self.project, name=self.name or info.name, mode=mode, entity=self.entity, dir=directory, id=run_id,
            resume="allow" if known and mode == "online" else None,  # offline W&B warns that it ignores this
            reinit="create_new",  # so that it does not become the user's `wandb.run`
            settings=wandb.Settings(console="off"))  # the writer's thread is no place to redirect stdout from
        if mode == "online":
            self._last_step = max(self._last_step, run.step)
        self._id = run_id
        clients.store_id(info, "wandb", run_id)
        return run
