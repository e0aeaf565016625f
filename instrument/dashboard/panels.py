"""What a page shows besides curves: the head of each run, alarms, layers, histograms, texts and tables. Functions of runs."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from instrument.dashboard import catalog, charts, decimate, maps
from instrument.dashboard.run import Run

COLUMNS, LAYERS = 160, 200  # of a heat map, at most
_ROWS, _TEXTS, _ALARMS, _FIRST = 400, 20, 50, 10


def heads(runs: Sequence[Run], now: float) -> list[dict[str, Any]]:
    """State, step, loss, speed, time left and alarms of each run."""
    labels = catalog.differing({run.name: parameters_of(run) for run in runs})
    found = []
    for index, run in enumerate(runs):
        store = run.store
        state, text = run.state(now)
        alarms = store.alarms
        total, pace = run.total_steps(), store.pace()
        loss = store.latest("loss")
        speed = next((each for each in ("tokens_per_second", "samples_per_second") if store.latest(each)), "")
        rate = store.latest(speed) if speed else None
        left = (total - store.last_step) * pace if state == "running" and total and pace and total > store.last_step else None
        found.append({
            "name": run.name, "differs": labels[run.name], "color": charts.color_of(index), "state": state,
            "text": text, "error": run.error, "step": store.last_step, "total": total, "skipped": store.skipped,
            "loss": None if loss is None else number(loss.value), "speed": None if rate is None else number(rate.value),
            "unit": speed.split("_")[0], "pace": None if pace is None else number(pace),
            "left": round(left) if left is not None and left < 1e10 else None,
            "alarms": sum(alarm.active for alarm in alarms), "seen": len(alarms),
            "progress": None if run.progress is None else round(run.progress, 2)})
    return found


def alarms(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Those that last first, then the newest; of too many the very first at the end."""
    found = [(run.name, alarm) for run in runs for alarm in maps.both_ends(run.store.alarms, _FIRST, _ALARMS)]
    found.sort(key=lambda each: (not each[1].active, -each[1].first_step))
    if len(found) > _ALARMS:  # the first ones tell where it came from
        first = sorted(found, key=lambda each: each[1].first_step)[:_FIRST]
        found = [each for each in found if each not in first][:_ALARMS - _FIRST] + first[::-1]
    return [{"run": name, "alarm": alarm.alarm, "step": alarm.first_step, "last": alarm.last_step, "message": alarm.message,
             "where": alarm.where, "metric": alarm.metric, "active": alarm.active} for name, alarm in found[:_ALARMS]]


def layers_over_time(run: Run, metrics: Sequence[str], *, start: int, stop: int, unit: str) -> dict[str, Any]:
    """The heat map of a statistic."""
    width = decimate.width_for(stop - start + 1, COLUMNS)
    columns = {name: run.store.means(name, width=width, start=start, stop=stop) for name in metrics}
    steps, cells, bad, ends, log = maps.layer_cells(columns)
    return maps.heat_map([_layer(name) for name in metrics], steps, cells, bad=bad, ends=ends, log=log, unit=unit)


def layers_at(run: Run, metrics: Sequence[str], *, statistic: str, step: int, unit: str) -> dict[str, Any]:
    """Bars of the same statistic at one step, of each layer the last value by then."""
    values = [run.store.value_at(name, step) for name in metrics]
    finite = [None if each is None or not math.isfinite(each[1]) else each[1] for each in values]
    chart = maps.bars([_layer(name) for name in metrics], finite, horizontal=True, unit=unit, name=statistic)
    measured = sorted({each[0] for each in values if each is not None})
    at = f"at step {measured[0]:,}" if len(measured) == 1 else f"at steps {measured[0]:,} to {measured[-1]:,}" if measured \
        else f"not measured by step {step:,}"
    chart["extra"]["caption"] = f"{statistic} {at}"
    chart["extra"]["bad"] = [index for index, each in enumerate(values) if each is not None and not math.isfinite(each[1])]
    return chart


def histograms(run: Run, name: str, *, start: int | None, stop: int | None, step: int) -> dict[str, dict[str, Any]]:
    """A histogram over time and at one step; empty where there is none in the range."""
    snapshots = [each for each in run.store.histograms(name)
                 if (start is None or each[0] >= start) and (stop is None or each[0] <= stop)]
    if not snapshots:
        return {}
    chosen = next((each for each in reversed(snapshots) if each[0] <= step), snapshots[0])
    bars = maps.histogram_bars(chosen)
    bars["extra"]["caption"] = f"step {chosen[0]:,}, n = {int(chosen[2].sum()):,}"
    return {"histogram": maps.histogram_map(snapshots), "bins": bars}


def table(runs: Sequence[Run], names: Sequence[str], *, units: Mapping[str, str], wanted: str) -> dict[str, Any]:
    """The latest values of the metrics that have a text in their names."""
    chosen = [name for name in names if wanted.lower() in name.lower()]

    def cells(run: Run, name: str) -> list[Any] | None:
        latest = run.store.latest(name)
        if latest is None:
            return None
        extremes = [number(latest.least), number(latest.largest)] if latest.least <= latest.largest else [None, None]
        return [latest.step, number(latest.value), *extremes]

    return {"runs": [run.name for run in runs], "all": len(chosen), "wanted": wanted,
            "rows": [{"name": name, "unit": catalog.unit_of(name, units), "values": [cells(run, name) for run in runs]}
                     for name in chosen[:_ROWS]]}


def texts(run: Run, name: str) -> dict[str, Any]:
    """The newest texts of that name, of any for an empty one."""
    kept = run.store.texts
    shown = [text for text in kept if not name or text["name"] == name]
    return {"names": sorted({text["name"] for text in kept}), "chosen": name,
            "items": [{**text, "text": text["text"][:20_000]} for text in shown[:-_TEXTS - 1:-1]]}


def parameters(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Hyper-parameters, versions and command of each run."""
    return [{"name": run.name, "items": {key: str(value)[:200] for key, value in list(parameters_of(run).items())[:200]},
             "versions": _object(run.config.get("versions")), "command": _command(run)} for run in runs]


def _command(run: Run) -> str:
    command = run.config.get("command")
    return " ".join(map(str, command))[:500] if isinstance(command, list) else ""


def parameters_of(run: Run) -> dict[str, Any]:
    """Hyper-parameters of a run, `{name: value}`."""
    return _object(run.config.get("hyper_parameters"))


def units_of(runs: Sequence[Run]) -> dict[str, str]:
    """`{metric: unit}` of what the runs' schemas say."""
    found: dict[str, str] = {}
    for run in runs:
        schema = run.config.get("schema")
        for metric in schema if isinstance(schema, list) else ():
            if isinstance(metric, dict) and isinstance(metric.get("name"), str):
                found.setdefault(metric["name"], str(metric.get("unit") or "1"))
    return found


def threshold(runs: Sequence[Run]) -> float | None:
    """The norm that gradients are clipped to, where all runs have the same; None where they do not say."""
    norms: list[Any] = [run.config.get("max_grad_norm") for run in runs]  # of files, so of any type
    known = all(type(norm) in (int, float) and norm > 0 and norm == norms[0] for norm in norms)
    return float(norms[0]) if norms and known else None


def number(value: float) -> Any:
    """A number as JSON has it: what is not finite as its text."""
    return value if math.isfinite(value) else str(float(value))


def _layer(metric: str) -> str:
    return metric.split("/", 2)[2]


def _object(value: Any) -> dict[str, Any]:
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else {}
