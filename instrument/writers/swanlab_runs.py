"""`SwanLabWriter`: SwanLab, through its own client."""
from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from instrument.record import Record, RunInfo
from instrument.writers import clients
from instrument.writers.base import Writer
from instrument.writers.extras import require

INFINITE = "instrument/infinite"
_MODES = ("online", "local", "offline", "disabled")
# SwanLab strips or refuses these at the ends of names, and control characters anywhere, each release in its own way.
_REFUSED = re.compile(r"^[\s./]+|[\s./]+$|[\x00-\x1f\x7f]")


class SwanLabWriter(Writer):
    """Logs the numbers and texts of each record to one SwanLab run, at the record's step.

    NaN and infinities are kept; SwanLab before 0.8 makes inf of -inf, which is left out there, and is in the text
    `instrument/infinite` instead. An alarm is a text, `alarms/<alarm>`, at the steps where it begins and ends.
    Hyper-parameters become the config. Histograms, for which SwanLab has no place, are left out. Characters in names that
    SwanLab refuses become `_`, and a checksum follows.

    By default nothing leaves the machine: the run is a folder `swanlog/run-*` of the run directory, or of the working
    directory where there is none, and `swanlab sync FOLDER` uploads it.

    SwanLab has one run a process. Where `swanlab.init` has been called, the records go to that run, which is not finished
    here. Otherwise this writer's run begins with its first record and ends with `close`. A resumed run makes another folder;
    from SwanLab 0.8 on it keeps its id, which is in `clients.json` of the run directory.

    SwanLab before 0.8 needs about half a millisecond for each number: with 1,000 metrics, record every tenth step or fewer.

    SwanLab from 0.6.5 on needs protobuf 6, and MindSpore 2.10.0 protobuf 7: a newer SwanLab installed beside that MindSpore
    breaks `import mindspore`. The extra `swanlab` takes a release that works with both. With MindSpore up to 2.9.0,
    `pip install swanlab` gets a newer one, which this writer takes as well, but for 0.8.0 to about 0.9.5: these start in
    the main thread only, and a writer is in another.

    Args:
        project: The project.
        name: What SwanLab shows as the run's name; by default the name of the run directory.
        mode: `online`, `local` (with SwanLab's own dashboard, where it is installed), `offline` or `disabled`. By default
            what `SWANLAB_MODE` says, and `offline` where it is not set. `online` needs `swanlab login` beforehand.

    Raises:
        ValueError: `mode` is none of these.
        ImportError: At the first record: swanlab is not installed.

    Examples:
        >>> monitor = TrainingMonitor("runs/first", writers=[SwanLabWriter(project="gpt")])       # doctest: +SKIP
    """

    def __init__(self, *, project: str = "instrument", name: str | None = None, mode: str | None = None):
        clients.check_mode(mode, _MODES, variable="SWANLAB_MODE")
        self.project, self.name, self.mode = project, name, mode
        self._info = RunInfo()
        self._swanlab: Any = None
        self._ours: bool | None = None  # whether the open run, or one that could not be opened, is the writer's
        self._id: str | None = None

    def start(self, run: RunInfo) -> None:
        self._info = run

    def write(self, record: Record) -> None:
        swanlab = self._swanlab = self._swanlab or self._open()
        wrong = [] if _has_ids(swanlab) else [name for name, value in record.values.items() if value == -math.inf]
        row: dict[str, Any] = {accepted(name): value for name, value in record.values.items() if name not in wrong}
        if wrong:
            row[INFINITE] = swanlab.Text("\n".join(f"{name}: -inf" for name in wrong))
        row.update((accepted(name), swanlab.Text(text)) for name, text in record.texts.items())
        messages = defaultdict(list)
        for incident in record.alarms:
            messages[incident.alarm].append(str(incident))
        row.update((accepted(f"alarms/{alarm}"), swanlab.Text("\n".join(lines))) for alarm, lines in messages.items())
        if row:
            swanlab.log(row, step=record.step)

    def close(self) -> None:
        swanlab, self._swanlab = self._swanlab, None
        if swanlab is None:
            return
        ours, self._ours = self._ours, None
        if ours and _running(swanlab):
            with _same_excepthook():
                swanlab.finish()

    def _open(self) -> Any:
        swanlab = require("swanlab", "swanlab")
        if self._ours is None:
            self._ours = not _running(swanlab)
        if self._ours:
            with _same_excepthook():
                self._init(swanlab)
        else:
            swanlab.config.update(clients.hyper_parameters(self._info))
        return swanlab

    def _init(self, swanlab: Any) -> None:
        info = self._info
        mode = self.mode or os.environ.get("SWANLAB_MODE") or "offline"
        directory = None
        if info.directory is not None:
            directory = str(info.directory / "swanlog")
            os.makedirs(directory, exist_ok=True)
        # The output of a training is not SwanLab's, and the writer's thread no place to redirect it from. (Before 0.8 it does
        # so in offline mode all the same: it forgets this setting.)
        if _has_ids(swanlab):
            run_id = self._id = self._id or clients.stored_id(info, "swanlab") or secrets.token_hex(10)
            settings = swanlab.Settings(terminal={"proxy_type": "none"})
            swanlab.init(project=self.project, name=self.name or info.name, mode=mode, log_dir=directory, settings=settings,
                         config=clients.hyper_parameters(info), id=run_id, resume="allow")
            clients.store_id(info, "swanlab", run_id)
        else:
            swanlab.init(project=self.project, experiment_name=self.name or info.name, logdir=directory,
                         mode="cloud" if mode == "online" else mode, settings=swanlab.Settings(log_proxy_type="none"),
                         config=clients.hyper_parameters(info))


def accepted(name: str) -> str:
    """The name that SwanLab has for one of ours: the same, but for characters that it refuses.

    Examples:
        >>> accepted("grad/norm/head.weight"), accepted("loss/")
        ('grad/norm/head.weight', 'loss_-00d14b61')
    """
    return clients.accepted_name(name, refused=_REFUSED, longest=255)


def _has_ids(swanlab: Any) -> bool:
    """Whether this is the SwanLab from 0.8 on: its runs have ids, and its functions other arguments."""
    return hasattr(swanlab, "has_run")


def _running(swanlab: Any) -> bool:
    if _has_ids(swanlab):
        return swanlab.has_run()
    run = swanlab.get_run()  # SwanLab before 0.8 keeps a run that has ended
    return run is not None and run.running


@contextlib.contextmanager
def _same_excepthook() -> Iterator[None]:
    """SwanLab puts its own in the place of `sys.excepthook`, and Python's when it ends; the user may have another one."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
