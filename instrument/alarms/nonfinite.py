"""`NonFinite`: a NaN or an infinity in training, and where it came from."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, Union

import numpy as np

from instrument.alarms.arguments import whole
from instrument.alarms.base import NOT_JUDGED, Alarm, Finding, NotJudged, Policy, Verdict
from instrument.nonfinite import FirstNonfinite, Place, first_nonfinite
from instrument.record import Record

Locate = Callable[[Mapping[str, float]], "FirstNonfinite | None"]

# DynamicLossScaleManager begins with 2**24 and halves: so many overflows in a row bring the scale down to 1.
_FIRST_OVERFLOWS = 24

_STATS = ("nonfinite", "mean", "rms", "absmax")
# The flag tells; without it, what a NaN is in for sure; a root mean square alone is NaN too where the squares are too small.
_TELLING = (("nonfinite",), ("mean", "absmax"), ("rms",))

Judgement = Union[Finding, None, Literal[NotJudged.NOT_JUDGED]]


class NonFinite(Alarm):
    """Loss, gradients, activations or weights that are not finite.

    It looks at `loss`, `loss/<part>`, `grad/norm` with `grad/nonfinite`, `weight/norm`, the statistics of activations and of
    their gradients, and at everything in `val/`. It names what was not finite first in the order of execution, and what was
    finite just before it. Norms of single parameters are not looked at: they are NaN too where a float32 cannot hold the
    squares.

    An overflow that loss scaling has seen (`overflow` and `skipped` are 1) is what loss scaling is there for, and no alarm,
    unless a weight is not finite; many in a row are.

    Args:
        overflows: From how many recorded overflows in a row on they are an alarm. By default 10: a dynamic scale has fallen
            to a thousandth by then, and a fixed one will not help itself. Before the first step without overflow it is at
            least 24, as a dynamic scale looks for its size: from 2^24 it takes 24 halvings to 1.
        first_nonfinite: Tells from the values of a record what was not finite first, as the step's `schema.first_nonfinite`
            does, which a monitor uses by itself (`locate`). Without either, the order is that of the metrics.
        policy: As for each `Alarm`, and so `name` and `quiet`.

    Attributes:
        locate: What the monitor sets, to be used where no `first_nonfinite` was given.
    """

    needs = ("loss", "loss/", "grad/norm", "weight/norm", "activation/", "activation_grad/", "val/")

    def __init__(self, *, overflows: int = 10, first_nonfinite: Locate | None = None, policy: Policy = "log",
                 name: str | None = None, quiet: int | None = None):
        super().__init__(policy=policy, name=name, quiet=quiet)
        self.overflows = whole("overflows", overflows)
        self.first_nonfinite = first_nonfinite
        self.locate: Locate | None = None
        self.reset()

    def reset(self) -> None:
        self._overflows = 0  # in a row
        self._limit = max(self.overflows, _FIRST_OVERFLOWS)
        # Of the record before, where it was bad: what stays bad is located once.
        self._last: Finding | None = None

    def check(self, record: Record) -> Verdict:
        verdicts = {"training": self._training(record), "validation": self._validation(record)}
        if all(verdict is NOT_JUDGED for verdict in verdicts.values()):
            return NOT_JUDGED
        return {key: verdict for key, verdict in verdicts.items() if verdict is not None}

    def _validation(self, record: Record) -> Judgement:
        group, numbers = self.columns.select(record, "val/")
        if not len(group):
            return NOT_JUDGED
        fine = np.isfinite(numbers)
        if fine.all():
            return None
        worst = int(np.argmin(fine))
        return Finding(f"{group.metrics[worst]} is {numbers[worst]:g}", group.metrics[worst], float(numbers[worst]))

    def _training(self, record: Record) -> Judgement:
        values = record.values
        bad, judged = self._bad(record)
        if not judged:
            return NOT_JUDGED
        if values.get("overflow", 0.0) > 0 and values.get("skipped", 0.0) > 0:
            self._overflows += 1
            if bad != "weight/norm" and self._overflows < self._limit:
                return NOT_JUDGED
            if bad != "weight/norm":
                bad = "overflow"
        elif "overflow" in values:
            self._overflows, self._limit = 0, self.overflows
        if bad is None:
            self._last = None
        elif self._last is None:
            self._last = self._finding(values, bad)
        return self._last

    def _bad(self, record: Record) -> tuple[str | None, bool]:
        """The metric that shows it, weights before all others, and whether there was anything to look at."""
        values = record.values
        bad = [metric for metric in ("weight/norm", "loss") if not math.isfinite(values.get(metric, 0.0))]
        count, norm = values.get("grad/nonfinite"), values.get("grad/norm")
        # The norm is NaN too where all squares are too small for a float32; nothing is counted then.
        if count is not None and not count == 0:
            bad.append("grad/nonfinite")
        elif norm is not None and (math.isinf(norm) or math.isnan(norm) and count is None):
            bad.append("grad/norm")
        judged = any(metric in values for metric in ("loss", "grad/norm", "weight/norm", "grad/nonfinite"))
        for prefixes in (("loss/",), self._telling(record, "activation"), self._telling(record, "activation_grad")):
            for prefix in prefixes:
                group, numbers = self.columns.select(record, prefix)
                fine = numbers == 0 if prefix.endswith("/nonfinite/") else np.isfinite(numbers)
                judged = judged or len(group) > 0
                if not fine.all():
                    bad.append(group.metrics[int(np.argmin(fine))])
        return bad[0] if bad else None, judged

    def _telling(self, record: Record, kind: str) -> list[str]:
        for stats in _TELLING:
            prefixes = [f"{kind}/{stat}/" for stat in stats]
            if any(len(self.columns.select(record, prefix)[0]) for prefix in prefixes):
                return prefixes
        return []

    def _finding(self, values: Mapping[str, float], metric: str) -> Finding:
        text = f"{metric} is {values[metric]:g}"
        if metric == "overflow":
            text = f"{self._overflows} overflows in a row"
            text += f", at a loss scale of {values['loss_scale']:g} now" if "loss_scale" in values else ""
        first: FirstNonfinite | None = None
        failed = ""
        locate = self.first_nonfinite or self.locate
        if locate is not None:
            try:
                first = locate(values)
            except Exception as error:  # the alarm matters more than the place
                failed = f" (the step could not tell where: {type(error).__name__}: {error})"
        if first is None:
            first = first_nonfinite(values, _order(values))
        where = "" if first is None else first.name or first.kind
        if where in ("", "loss"):
            where = next((name[5:] for name in values if name[:5] == "loss/" and not math.isfinite(values[name])), where)
        text += "" if first is None else f". First not finite: {first}"
        text += f"; of the losses: {where}" if first is not None and first.kind == "loss" and where != "loss" else ""
        return Finding(text + failed, metric, values[metric], where)


def _order(values: Mapping[str, float]) -> list[Place]:
    """An order of execution by that of the metrics: weights, cells, the loss, and gradients from the last to the first."""
    def names(*prefixes: str) -> list[str]:
        return list(dict.fromkeys(name[len(prefix):] for prefix in prefixes for name in values if name.startswith(prefix)))

    order: list[Place] = [("weight", name) for name in names("weight/norm/")] + [("weight", "")]
    order += [("activation", name) for name in names(*(f"activation/{stat}/" for stat in _STATS))] + [("loss", "")]
    order += [("activation_grad", name) for name in reversed(names(*(f"activation_grad/{stat}/" for stat in _STATS)))]
    return order + [("grad", name) for name in reversed(names("grad/norm/"))] + [("grad", "")]
