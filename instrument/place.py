"""`Place`: the run directory of a monitor, on each rank, over several calls of `Model.train`.

Owns when a directory is taken, held and let go of. What lies in it is the part of `runs.py` and of the writers.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from instrument import _compat, runs
from instrument.record import RunInfo
from instrument.schema import ONE_FOR_ALL, Schema


class Place:
    """Rank 0 takes the directory at once; another rank finds it with its first record, since only then its name is known.

    Args:
        path: What the user gave.
        resume: Go on in it, if it holds a run.
        config: For `config.json`.
        rank: This process.
        ranks: How many there are.

    Raises:
        RunInUse: As for `runs.create`; likewise FileExistsError and OSError.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool, config: Mapping[str, Any], rank: int, ranks: int):
        self._path, self._rank, self._resume = path, rank, resume
        self._schema: Schema | None = None
        self._max_grad_norm: float | None = None
        self._asked = False  # for the step after which the run goes on
        self._goes_on_after: int | None = None
        stage, stages = _compat.pipeline_stage() if ranks > 1 else (None, None)
        device = {"device": _compat.device_target(), "graph_mode": _compat.is_graph_mode()}
        self._arguments: dict[str, Any] = {"config": {**config, **device}, "rank": rank, "ranks": ranks, "stage": stage,
                                           "stages": stages, "job": _compat.job() if ranks > 1 else None}
        self.run: runs.Run | None = runs.create(path, resume=resume, **self._arguments) if rank == 0 else None
        if self.run is not None and self.run.renamed:
            print(f"{path} holds a run already: this one goes to {self.directory}", flush=True)

    @property
    def directory(self) -> Path | None:
        """The directory, absolute; None on another rank than 0 until its first record."""
        return None if self.run is None else self.run.path

    def find(self) -> runs.Run:
        """The run; on another rank than 0 this waits for rank 0. Called in the background."""
        if self.run is None:
            self.run = runs.follow(self._path, **self._arguments)
            self._store_schema()
        return self.run

    def info(self, total_steps: int | None) -> RunInfo:
        """What writers are told."""
        if self.run is None:
            return RunInfo(total_steps=total_steps)
        return replace(self.run.info(total_steps=total_steps), resumed_step=self._goes_on_after)

    @property
    def recorded(self) -> int:
        """The last step that an earlier process recorded; 0 where there was none."""
        return runs.last_step(self.run) if self.run is not None and self.run.resumed else 0

    def goes_on_after(self, step: int) -> None:
        """Training goes on after this step, which the checkpoint tells."""
        self._goes_on_after = step

    def resumed_after(self) -> int | None:
        """The last step that an earlier process recorded, for the first call; None where this run is not resumed."""
        if self._asked:
            return None
        self._asked = True
        if self.run is None:
            # Another rank finds the run in the background, but must count its steps as rank 0 does from the first one on, or
            # they would measure different ones. Before that one rank 0 has recorded nothing new.
            return (runs.last_step(self._path) or None) if self._resume else None
        return runs.last_step(self.run) if self.run.resumed else None

    def open(self, total_steps: int | None = None) -> None:
        """Hold the directory, again after `close`, and note how many steps the run will have."""
        if self.run is not None:
            self.run.reopen()
            if total_steps is not None and self.run.config.get("total_steps") != total_steps:
                runs.write_total_steps(self.run, total_steps)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Leave the summary, and let another process resume the run."""
        if self.run is not None:
            try:
                runs.write_summary(self.run, summary)
            finally:
                self.run.close()

    def name_metrics(self, schema: Schema, max_grad_norm: float | None = None) -> None:
        """Store what the step's vector holds, and the norm that the step clips its gradients to."""
        self._schema, self._max_grad_norm = schema, max_grad_norm
        self._store_schema()

    def _store_schema(self) -> None:
        if self.run is not None and self._schema is not None:
            # Another rank describes what it records: with a thousand of them, the same for all would be hundreds of megabytes.
            metrics = [metric for metric in self._schema if self._rank == 0 or metric.scope not in ONE_FOR_ALL]
            runs.write_schema(self.run, metrics, self._schema.histogram_names, max_grad_norm=self._max_grad_norm)
