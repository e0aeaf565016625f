"""`Comparison`: two or more runs side by side: what they reached, how fast, where they part, and which alarms they had.

Owns which numbers say how a run went. Does not import MindSpore.
"""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from instrument.reading import RunData, Series
from instrument.record import VALIDATION

# Smaller is better of these and of what has them as its first part.
_LOSSES = ("loss", "perplexity")
_THROUGHPUT = (("tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s"), ("step_time", "s/step"))
# From here on two losses are apart, and not only rounded otherwise.
_APART = 0.01
# What training is made of, causes before effects. One family is of one kind of magnitude.
_RATE = "learning_rate"
_FAMILIES = (_RATE, "weight/norm", "activation/rms", "attention/max_logit", "loss", "activation_grad/rms",
             "grad/norm")
# What is smaller than this part of its family's largest may be nothing but rounding, as the gradient of a bias of keys is.
_ROUNDING = 1e-4


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        name: What it is.
        cells: One text a run; empty where the run has no such number.
    """

    name: str
    cells: tuple[str, ...]


class Comparison:
    """What of the runs is to be compared.

    Args:
        runs: Two or more, as `instrument.read` gives them. The first is what the others are held against.

    Attributes:
        names: What tells the runs apart: the end of their paths.
        rows: The table.

    Raises:
        ValueError: There are fewer than two runs.
    """

    def __init__(self, runs: Sequence[RunData]):
        if len(runs) < 2:
            raise ValueError(f"a comparison needs two runs or more, but there are {len(runs)}.")
        self.runs = list(runs)
        self.names = _short_names([str(run.path) for run in runs])
        self.rows = [*self._course(), *self._reached(), *self._pace(), *self._divergence(), *self._alarms(), *self._settings()]

    def _course(self) -> list[Row]:
        steps = [max((int(run[name].step[-1]) for name in run if len(run[name].step)), default=0) for run in self.runs]
        spans = [run.times.value for run in self.runs]
        # Unless the clock was set back.
        seconds = [_clock(span[-1] - span[0]) if len(span) > 1 and span[-1] >= span[0] else "" for span in spans]
        return [Row("last step", tuple(map(str, steps))), Row("time", tuple(seconds))]

    def _reached(self) -> list[Row]:
        rows = []
        known = dict.fromkeys(name for run in self.runs for name in run if name == "loss" or name.startswith(VALIDATION))
        for name in [*known, "grad/norm"]:
            finals = [_last(run.get(name)) for run in self.runs]
            if not any(finals):
                continue
            rows.append(Row(f"{name}, last", tuple(finals)))
            if name != "grad/norm":
                rows.append(Row(f"{name}, lowest", tuple(_extreme(run.get(name), np.nanargmin) for run in self.runs)))
            if name.startswith(VALIDATION) and name[len(VALIDATION):].partition("/")[0] not in _LOSSES:
                rows.append(Row(f"{name}, highest", tuple(_extreme(run.get(name), np.nanargmax) for run in self.runs)))
        return rows

    def _pace(self) -> list[Row]:
        rows = []
        for name, unit in _THROUGHPUT:
            medians = [_median(run.get(name)) for run in self.runs]
            if any(medians):
                rows.append(Row(f"{unit}, median", tuple(medians)))
        return rows

    def _divergence(self) -> list[Row]:
        """Where the loss of a run leaves that of the first one."""
        first = self.runs[0].get("loss")
        differs, apart = ["(the others against this one)"], [""]
        for run in self.runs[1:]:
            found = divergence(first, run.get("loss"))
            differs.append("no steps in common" if found is None else _step(found[0], "nowhere"))
            apart.append("" if found is None else _step(found[1], "nowhere"))
        rows = [Row("loss differs from", tuple(differs)), Row(f"by {_APART:.0%} from", tuple(apart))] if first else []
        found_first = [first_apart(self.runs[0], run) for run in self.runs[1:]]
        if any(found_first):
            cells = ("nowhere" if each is None else f"{each[1][0]}, step {each[0]}"
                     + (f", and {len(each[1]) - 1} more" if len(each[1]) > 1 else "") for each in found_first)
            rows.append(Row(f"first to part by {_APART:.0%}", ("", *cells)))
        return rows

    def _alarms(self) -> list[Row]:
        cells = []
        for run in self.runs:
            begun = [alarm for alarm in run.alarms if alarm.get("state") == "begin"]
            kinds = dict.fromkeys(alarm["alarm"] for alarm in begun)
            parts = []
            for kind in kinds:
                of_kind = [alarm.get("first_step", alarm["step"]) for alarm in begun if alarm["alarm"] == kind]
                parts.append(f"{kind} {len(of_kind)}×, first at step {min(of_kind)}" if len(of_kind) > 1
                             else f"{kind} at step {of_kind[0]}")
            cells.append("; ".join(parts) or "none")
        return [Row("alarms", tuple(cells))]

    def _settings(self) -> list[Row]:
        """The hyper-parameters that are not the same in all runs."""
        given: list[Mapping[str, Any]] = [run.config.get("hyper_parameters") or {} for run in self.runs]
        names = dict.fromkeys(name for each in given for name in each)
        missing = object()
        return [Row(f"{name} =", tuple("" if name not in each else str(each[name]) for each in given)) for name in names
                if any(each.get(name, missing) != given[0].get(name, missing) for each in given[1:])]


def divergence(first: Series | None, other: Series | None, least: float = 0.0) -> tuple[int | None, int | None] | None:
    """Where two series part.

    Args:
        least: Values that are smaller are taken for so large where it is asked whether a difference is large.

    Returns:
        The first step that both have and at which they differ at all, and at which they differ by more than 1 % of the
        first, each None where there is no such step. A value that is not finite differs from any other. None where the
        series have no step in common.
    """
    if first is None or other is None:
        return None
    steps, one, two = first.step, first.value, other.value
    if not np.array_equal(steps, other.step):
        steps, at, there = np.intersect1d(first.step, other.step, return_indices=True)
        one, two = first.value[at], other.value[there]
    if not len(steps):
        return None
    same = (one == two) | (np.isnan(one) & np.isnan(two))
    with np.errstate(invalid="ignore"):
        near = np.isfinite(one) & (np.abs(two - one) <= _APART * np.maximum(np.abs(one), least))
    apart = ~same & ~near
    return _first_step(steps, ~same), _first_step(steps, apart)


def first_apart(first: RunData, other: RunData) -> tuple[int, list[str]] | None:
    """The first number of training in which two runs part: the same data and weights, and yet another layer's output.

    Looked at are learning rates, norms of weights and gradients, root mean squares of activations, attention logits and
    losses; a rate of all parameters is held against those of groups. They are apart where they differ by more than 1 % of the
    first; below 1e-4 of the largest in its family, of that.

    Returns:
        (step, the metrics that are apart there: rates before weights, activations, losses and gradients, and in the order of
        the record). None where no number that both have is apart at a step that both have.
    """
    apart: dict[str, int] = {}
    for family in _FAMILIES:
        names = [name for name in first if name == family or name.startswith(f"{family}/")]
        medians = [np.median(np.abs(first[name].value)) for name in names if np.isfinite(first[name].value).all()]
        least = _ROUNDING * max((median for median in medians), default=0.0)
        pairs = [(name, name, name) for name in names] + (_rates(first, other) if family == _RATE else [])
        for name, one, two in pairs:
            found = divergence(first.get(one), other.get(two), least)
            if found is not None and found[1] is not None:
                apart[name] = found[1]
    if not apart:
        return None
    step = min(apart.values())
    return step, [name for name, at in apart.items() if at == step]


def _rates(first: RunData, other: RunData) -> list[tuple[str, str, str]]:
    """(the group's name, name in first, name in other), where one run has a rate of all parameters and one of each group."""
    if (_RATE in first) == (_RATE in other):
        return []
    groups = [name for name in (other if _RATE in first else first) if name.startswith(f"{_RATE}/")]
    return [(name, _RATE, name) if _RATE in first else (name, name, _RATE) for name in groups]


def _first_step(steps: np.ndarray, which: np.ndarray) -> int | None:
    return int(steps[np.argmax(which)]) if which.any() else None


def _step(step: int | None, otherwise: str) -> str:
    return otherwise if step is None else f"step {step}"


def _last(series: Series | None) -> str:
    return "" if series is None or not len(series.value) else _number(series.value[-1])


def _extreme(series: Series | None, where: Any) -> str:
    if series is None or np.isnan(series.value).all():
        return ""
    at = where(series.value)
    return f"{_number(series.value[at])} at step {series.step[at]}"


def _median(series: Series | None) -> str:
    return "" if series is None or not len(series.value) else _number(np.median(series.value))


def _number(value: float) -> str:
    return f"{value:.5g}"


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds; below a minute seconds with three digits, which a run of few or short steps needs."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _short_names(paths: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that are different."""
    parts = [path.split(os.sep) for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        ends = [os.sep.join(each[-length:]) for each in parts]
        if len(set(ends)) == len(ends):
            return ends
    return [f"{path} ({i})" for i, path in enumerate(paths, 1)]
