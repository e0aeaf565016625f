"""Which metrics go into which chart, in which order, with which units. Functions of names; knows nothing of values."""
from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import regex

# Units of what is added on the host; those of the step's own metrics are in `config.json`.
UNITS = {"learning_rate": "1", "step_time": "seconds", "data_wait": "seconds", "data_wait_fraction": "fraction",
         "samples_per_second": "samples/s", "tokens_per_second": "tokens/s", "host/memory": "bytes",
         "host/memory_available": "bytes", "host/cpu": "cores", "device/memory": "bytes",
         "device/memory_peak": "bytes", "device/memory_used": "bytes", "device/utilization": "fraction", "epoch": "epochs",
         "perplexity": "1"}
# More curves in one chart are no longer told apart; the heat map shows all.
MOST_CURVES = 12
_MOST_OF_EACH = 3  # of several runs: as many as there are kinds of dashes

# An expression comes in an address, which anybody may have made, and some of these keep a processor busy for ever.
_SECONDS = 0.2  # for an expression on all names


@dataclass(frozen=True)
class Spec:
    """One chart of curves.

    Attributes:
        id: Unique; part of addresses.
        title: For people.
        section: The heading that it is under.
        axes: Names of metrics, one tuple for each y axis: the left one, the right one, and a second one on the right.
        log: For each axis, whether it is logarithmic as a rule.
        zero: For each axis, whether it begins at zero as a rule; one of fractions then ends at 100 %.
        smooth: Whether smoothing makes sense: not of what changes in steps.
        ordered: Whether the metrics have an order, as layers do.
        note: What is to be said beside the title.
    """

    id: str
    title: str
    section: str
    axes: tuple[tuple[str, ...], ...]
    log: tuple[bool, ...] = (False, False, False)
    zero: tuple[bool, ...] = (False, False, False)
    smooth: bool = True
    ordered: bool = False
    note: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for axis in self.axes for name in axis)

    def is_log(self, turned: Iterable[str]) -> list[bool]:
        """For each axis whether it is logarithmic, where the left one is the other way for charts in `turned`."""
        return [log != (index == 0 and self.id in turned) for index, log in enumerate(self.log[:len(self.axes)])]


def charts(names: Sequence[str], picks: Iterable[str] = (), *, units: Mapping[str, str] | None = None,
           runs: int = 1) -> list[Spec]:
    """The charts of runs that have these metrics.

    Args:
        names: Metrics, in the order in which curves are to be.
        picks: Names or regular expressions, each one a chart of its own.
        units: `{name: unit}`: a pick with metrics of several units or kinds gets several axes.
        runs: How many are shown in each chart: of several, each shows fewer metrics.

    Returns:
        The core charts, whether there are values or not, picks, and whatever else there is a metric for.
    """
    have = set(names)

    def there(*wanted: str) -> tuple[str, ...]:
        return tuple(name for name in wanted if name in have)

    def starting(prefix: str) -> tuple[str, ...]:
        return tuple(name for name in names if name.startswith(prefix))

    most = MOST_CURVES if runs < 2 else min(MOST_CURVES // runs, _MOST_OF_EACH)
    rates = there("learning_rate") + starting("learning_rate/")
    core = (("loss", "Loss", there("loss", "val/loss"), "loss"),
            ("rate", "Learning rate", _spread(rates, most), "learning_rate"),
            ("grad", "Gradient norm", there("grad/norm", "grad/norm_clipped"), "grad/norm"))
    found = [Spec(id, title, "", (have_of or (usual,),), log=(id == "grad",), smooth=id != "rate",
                  note=(_left_out(rates, most) if id == "rate" else "") if have_of or not names else f"no {usual} recorded")
             for id, title, have_of, usual in core]
    found += [picked(pick, names, units or {}, MOST_CURVES // max(runs, 1)) for pick in picks]
    throughput = there("tokens_per_second") or there("samples_per_second") or there("step_time")
    wait = there("data_wait_fraction") or there("data_wait")
    rest = [Spec("throughput", _title(("Step time" if "step_time" in throughput else "Throughput", throughput),
                                      ("data wait", wait)), "Details", (throughput, wait), zero=(True, True)),
            Spec("memory", "Memory", "Details",
                 (there("device/memory", "device/memory_peak", "device/memory_used", "host/memory"),), smooth=False),
            Spec("weights", _title(("Weight norm", there("weight/norm")), ("update ratio", there("update/ratio"))), "Details",
                 (there("weight/norm"), there("update/ratio")), log=(False, True)),
            Spec("load", _title(("Device utilization", there("device/utilization")), ("host CPU", there("host/cpu"))),
                 "Details", (there("device/utilization"), there("host/cpu")), zero=(True, True)),
            Spec("moments", "Optimizer moments", "Details", (there("moment1/norm", "moment2/norm"), there("moment1/cosine")),
                 log=(True, False)),
            _capped("parts", "Parts of the loss", "Details", starting("loss/"), most),
            Spec("perplexity", "Perplexity", "Details", (there("perplexity", "val/perplexity"),), log=(True,)),
            _capped("validation", "Validation", "Details", tuple(name for name in starting("val/")
                                                                 if name not in ("val/loss", "val/perplexity")), most),
            Spec("ranks", "Loss of the ranks", "Details", (there("rank/max/loss", "loss", "rank/min/loss")
                                                           if "rank/max/loss" in have else (), there("rank/argmax/loss"))),
            Spec("waits", "Data wait of the ranks", "Details", (there("rank/max/data_wait", "rank/min/data_wait"),
                                                                there("rank/argmax/data_wait")), zero=(True, False)),
            Spec("scale", "Loss scale", "Details", (there("loss_scale"),), log=(True,), smooth=False),
            _capped("entropy", "Attention entropy", "Attention", starting("attention/entropy/"), most, ordered=True),
            _capped("logits", "Largest attention score", "Attention", starting("attention/max_logit/"), most, ordered=True)]
    for spec in rest:
        if spec.names:
            # An axis without metrics would be drawn all the same.
            kept = [each for each in zip(spec.axes, spec.log, spec.zero) if each[0]]
            axes, log, zero = zip(*kept)
            found.append(replace(spec, axes=axes, log=log, zero=zero))
    return found


def _title(*parts: tuple[str, tuple[str, ...]]) -> str:
    """A title of those parts that there is a metric for."""
    text = " and ".join(title for title, names in parts if names)
    return text[:1].upper() + text[1:]


def picked(pick: str, names: Sequence[str], units: Mapping[str, str], most: int = MOST_CURVES) -> Spec:
    """The chart of a name, or of the names that a regular expression finds: of too many, some."""
    id, note = f"pick:{pick}", ""
    if pick in names:
        found: tuple[str, ...] = (pick,)
    else:
        try:
            found = _matching(pick, tuple(names))
            note = "" if found else "no metric has such a name"
        except regex.error as error:
            found, note = (), f"no regular expression: {error}"
        except TimeoutError:
            found, note = (), "this regular expression takes too long"
    found, note = _spread(found, most), note or _left_out(found, most)
    axes: dict[tuple[str, str], list[str]] = {}
    for name in found:
        # What is of one kind shares an axis, as `loss` and `val/loss` do. Three axes are all that one can read.
        kind = unit_of(name, units), name.removeprefix("val/").split("/")[0]
        axes.setdefault(kind if kind in axes or len(axes) < 3 else list(axes)[-1], []).append(name)
    return Spec(id, pick, "Chosen metrics", tuple(map(tuple, axes.values())) or ((),), note=note)


@functools.lru_cache(32)
def _matching(pick: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names in which the expression is found. TimeoutError where it takes long: anybody can make an address with one.

    The library lets other threads run meanwhile, and keeps to its time, which `re` does not.
    """
    # Compiling unrolls what is counted: of counts in counts that would be all of the memory.
    if math.prod(max(int(count), 1) for count in regex.findall(r"\d+", "".join(regex.findall(r"\{[\d,\s]*\}", pick)))) > 1000:
        raise regex.error("counts of repetitions multiply to more than 1,000")
    expression = regex.compile(pick, cache_pattern=False)
    end = time.monotonic() + _SECONDS
    found = []
    for name in names:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if expression.search(name, timeout=left, concurrent=True):
            found.append(name)
    return tuple(found)


def unit_of(name: str, units: Mapping[str, str]) -> str:
    """The unit of a metric; `1` where none is known."""
    return units.get(name) or UNITS.get(name, "1")


def layered(names: Iterable[str]) -> dict[str, list[str]]:
    """`{statistic: metrics}` of what is measured layer by layer, as `activation/rms` of each cell; two layers at least."""
    found: dict[str, list[str]] = {}
    for name in names:
        parts = name.split("/", 2)
        if len(parts) == 3 and parts[0] not in ("val", "loss", "rank"):
            found.setdefault(f"{parts[0]}/{parts[1]}", []).append(name)
    return {statistic: metrics for statistic, metrics in found.items() if len(metrics) > 1}


def differing(runs: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """What tells runs apart: `{run: "batch_size=16, learning_rate=0.001"}` of the hyper-parameters that are not alike.

    Examples:
        >>> differing({"a": {"lr": 0.1, "layers": 4}, "b": {"lr": 0.2, "layers": 4}})
        {'a': 'lr=0.1', 'b': 'lr=0.2'}
    """
    keys = sorted({key for parameters in runs.values() for key in parameters})
    unlike = [key for key in keys if len({repr(parameters.get(key)) for parameters in runs.values()}) > 1]
    return {run: ", ".join(f"{key}={_short(parameters[key])}" for key in unlike[:4] if key in parameters)
            for run, parameters in runs.items()} if len(runs) > 1 else dict.fromkeys(runs, "")


def _short(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else text[:23] + "…"


def _capped(id: str, title: str, section: str, names: tuple[str, ...], most: int, *, ordered: bool = False) -> Spec:
    return Spec(id, title, section, (_spread(names, most),), ordered=ordered, note=_left_out(names, most))


def _left_out(names: tuple[str, ...], most: int) -> str:
    return f"{most} of {len(names)} metrics" if len(names) > most else ""


def _spread(names: tuple[str, ...], most: int) -> tuple[str, ...]:
    """At most so many, evenly spaced: of layers the first, the last, and some between."""
    if len(names) <= most:
        return names
    return tuple(names[round(index * (len(names) - 1) / max(most - 1, 1))] for index in range(most))
