"""`Session`: what one browser has, and so what it gets next.

A message is made when the browser has said that it got the last one, and says everything that is new since: a browser that is
slow or asleep misses nothing, and nothing is kept for it but a few numbers a curve. Curves that only grew are sent from their
last bucket on. Knows nothing of sockets.

    {"charts": {"loss": {"kind", "option", "extra"}}}                                            drawn anew
    {"charts": {"loss": {"option": {…}, "series": [{"id", "keep": 812, "add": [[x, y], …]}]}}}      812 points stay
"""
from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from instrument.dashboard import catalog, maps, panels
from instrument.dashboard.curves import Curves, Range, whole
from instrument.dashboard.follow import Follower
from instrument.dashboard.run import Run
from instrument.dashboard.view import LENGTH, MOST_CHANGES, MOST_RUNS, View

# Heat maps, histograms, tables and texts are made anew as a whole, at most so often, in seconds.
_SLOW = 2.0


class _Made(NamedTuple):
    """What a panel was made of: of another view it is made anew at once, of another version when it is time."""

    view: Any
    version: Any


class Session:
    """What one browser sees. Used by one thread at a time.

    Args:
        follower: Where runs come from.
        view: What it looks at; set `view` to look at something else.

    Attributes:
        visible: Ids of the charts and panels that are on its screen; None before it has said so.
    """

    def __init__(self, follower: Follower, view: View):
        self.follower, self.view = follower, view
        self.visible: set[str] | None = None
        self.forget()

    def forget(self) -> None:
        """The browser has nothing: everything is sent again."""
        self._sent: dict[str, Any] = {}  # what it has, by the key in the message
        self._made: dict[str, tuple[_Made, float]] = {}
        self._curves: dict[str, Curves] = {}
        self._units: tuple[list[int], list[dict[str, Any]], dict[str, str]] = ([], [], {})
        self._specs: tuple[Any, list[catalog.Spec], dict[str, list[str]]] = (None, [], {})

    def runs(self) -> list[Run]:
        """The runs in view that there are: those of the address, else the one that began last."""
        if not self.follower.found.keys() >= set(self.view.runs):
            self.follower.look_again()
        names = [name for name in self.view.runs if name in self.follower.found]
        if not self.view.runs:
            names = [self.follower.newest()]
        return [run for run in map(self.follower.run, names[:MOST_RUNS]) if run is not None]

    def message(self, now: float | None = None) -> dict[str, Any]:
        """What is new; empty where nothing is."""
        view, runs = self.view, self.runs()
        message: dict[str, Any] = {}
        heads = panels.heads(runs, time.time() if now is None else now)
        for key, value in (("address", view.query()), ("theme", view.theme), ("runs", heads), ("alarms", panels.alarms(runs))):
            self._put(message, key, value)
        ready = [run for run in runs if run.progress is None]
        names = list(dict.fromkeys(name for run in ready for name in run.store.names()))
        configs = [run.config for run in ready]
        if self._units[0] != [id(config) for config in configs]:  # each new one is another object
            self._units = [id(config) for config in configs], configs, panels.units_of(ready)
        units = self._units[2]
        specs, layers = self._catalog(view, ready, names, units)
        layout = _layout(view, specs, ready, layers)
        self._put(message, "layout", layout)
        self._drop({each["id"] for each in layout})
        changed: dict[str, Any] = {}
        if ready:
            shown = Range.of(view, ready)
            self._put(message, "whole", whole(view, ready))
            labels = {head["name"]: head["differs"] for head in heads}
            for spec in specs:
                if self._is_visible(spec.id):
                    curves = self._curves.setdefault(spec.id, Curves())
                    chart = curves.update(spec, ready, view, shown=shown, units=units, differs=labels)
                    if chart is not None:
                        changed[spec.id] = chart
            self._maps(changed, view, ready[0], layers, units)
            self._tables(message, view, ready, names, units)
        if changed:
            message["charts"] = changed
        self._put(message, "parameters", panels.parameters(runs))
        return message

    def _catalog(self, view: View, runs: list[Run], names: list[str], units: dict[str, str]) \
            -> tuple[list[catalog.Spec], dict[str, list[str]]]:
        if not runs:
            return [], {}
        key = tuple(names), view.picks, units, [run.name for run in runs]
        if self._specs[0] != key:
            self._specs = key, catalog.charts(names, view.picks, units=units, runs=len(runs)), \
                catalog.layered(runs[0].store.names())
        return self._specs[1], self._specs[2]

    def _is_visible(self, *ids: str) -> bool:
        return self.visible is None or not self.visible.isdisjoint(ids)

    def _put(self, message: dict[str, Any], key: str, value: Any) -> None:
        if key not in self._sent or self._sent[key] != value:
            self._sent[key] = message[key] = value

    def _drop(self, shown: set[str]) -> None:
        """What has left the page comes back empty."""
        self._curves = {id: curves for id, curves in self._curves.items() if id in shown}
        for id in {"heat", "profile", "histogram"} - shown:
            self._made.pop(id, None)

    def _is_due(self, key: str, view: Any, version: Any) -> bool:
        """Whether a panel is to be made again; if so, it is noted as made."""
        made, at = self._made.get(key, (None, -math.inf))
        if made == (view, version) or (made is not None and made.view == view and time.monotonic() - at < _SLOW):
            return False
        self._made[key] = _Made(view, version), time.monotonic()
        return True

    def _maps(self, changed: dict[str, Any], view: View, run: Run, layers: dict[str, list[str]],
              units: dict[str, str]) -> None:
        """Heat map, layers at one step, histograms: of the first run."""
        shown, = Range.of(view, [run])
        step = shown.last if view.at is None else view.at
        what = run.name, id(run.store), run.store.generation, shown.start, shown.stop
        version = run.store.version
        statistic = _statistic(view, layers)
        metrics = maps.thinned(layers.get(statistic, []), panels.LAYERS)
        unit = catalog.unit_of(metrics[0], units) if metrics else "1"
        if metrics and self._is_visible("heat") and self._is_due("heat", (what, statistic, view.at), version):
            chart = panels.layers_over_time(run, metrics, start=shown.first if shown.start is None else shown.start,
                                            stop=shown.last, unit=unit)
            chart["extra"]["at"] = {"low": shown.first, "high": shown.last, "step": step, "newest": view.at is None}
            changed["heat"] = chart
        if metrics and self._is_visible("profile") and self._is_due("profile", (what, statistic, view.at), version):
            changed["profile"] = panels.layers_at(run, metrics, statistic=statistic, step=step, unit=unit)
        names = run.store.histogram_names()
        if names and self._is_visible("histogram", "bins"):
            name = _histogram(view, names)
            if self._is_due("histogram", (what, name, view.at), version):
                changed.update(panels.histograms(run, name, start=shown.start, stop=shown.stop, step=step))

    def _tables(self, message: dict[str, Any], view: View, runs: list[Run], names: list[str], units: dict[str, str]) -> None:
        versions = [(id(run.store), run.store.version) for run in runs]
        if self._is_visible("table") and self._is_due("table", ([run.name for run in runs], view.filter), versions):
            message["table"] = panels.table(runs, names, units=units, wanted=view.filter)
        if self._is_visible("texts") and self._is_due("texts", (runs[0].name, view.text), versions[0]):
            message["texts"] = panels.texts(runs[0], view.text)


def moved(view: View, name: str, value: Any) -> View:
    """The view after a browser's wish; unknown ones change nothing."""
    if name in ("heat", "histogram", "text", "large", "filter") and isinstance(value, str):
        return replace(view, **{name: value[:LENGTH]})  # type: ignore[arg-type]
    if name == "at" and (value is None or type(value) is int):
        return replace(view, at=value)
    if name == "scale" and isinstance(value, str):
        return replace(view, scales=_turned(view.scales, value))
    if name == "hide" and isinstance(value, str):
        return replace(view, hidden=_turned(view.hidden, value))
    return view


def _turned(items: tuple[str, ...], item: str) -> tuple[str, ...]:
    """Without it where it is there, with it where it is not."""
    return tuple(each for each in items if each != item) if item in items else (*items, item[:LENGTH])[-MOST_CHANGES:]


def _layout(view: View, specs: Sequence[catalog.Spec], runs: Sequence[Run], layers: dict[str, list[str]]) \
        -> list[dict[str, Any]]:
    """The cards of the page, in order."""
    found: list[dict[str, Any]] = [
        {"id": spec.id, "title": spec.title, "section": spec.section, "note": spec.note, "kind": "lines",
         "log": spec.is_log(view.scales)[0], "hidden": [each[len(spec.id) + 1:] for each in view.hidden
                                                        if each.startswith(spec.id + "|")]} for spec in specs]
    of_run = f"of {runs[0].name}" if len(runs) > 1 else ""  # of several, the first one's
    if layers:
        count = len(layers[_statistic(view, layers)])
        note = ", ".join(filter(None, [of_run, f"{panels.LAYERS} of {count} layers" if count > panels.LAYERS else ""]))
        found += [{"id": "heat", "title": "Layers over time", "section": "Layers", "kind": "heat", "choices": list(layers),
                   "chosen": _statistic(view, layers), "note": note},
                  {"id": "profile", "title": "Layers at one step", "section": "Layers", "kind": "bars", "note": note}]
    names = runs[0].store.histogram_names() if runs else []
    if names:
        found += [{"id": "histogram", "title": "Histogram over time", "section": "Histograms", "kind": "heat",
                   "choices": names, "chosen": _histogram(view, names), "note": of_run},
                  {"id": "bins", "title": "Histogram at one step", "section": "Histograms", "kind": "bars", "note": of_run}]
    return [{**each, "large": each["id"] == view.large} for each in found]


def _statistic(view: View, layers: dict[str, list[str]]) -> str:
    usual = next((each for each in ("activation/rms", "grad/norm") if each in layers), next(iter(layers), ""))
    return view.heat if view.heat in layers else usual


def _histogram(view: View, names: Sequence[str]) -> str:
    return view.histogram if view.histogram in names else names[0]
