"""The page: its bar of controls, of NiceGUI's elements, and below it the component `static/live.js`, which draws all the rest.

Owns what a control changes in the view. What the page shows comes over the socket that `server.py` serves; nothing of a run
passes through NiceGUI, which queues for browsers that do not listen, but the names for its lists.
"""
from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import Request
from nicegui import app, ui
from nicegui.element import Element

from instrument.dashboard.desk import Desk
from instrument.dashboard.follow import Follower
from instrument.dashboard.view import AUTO, LENGTH, MOST_PICKS, MOST_RUNS, SMOOTHING, THEMES, WINDOWS, X_AXES, View

STATIC = Path(__file__).parent / "static"
_ICONS = {"auto": "brightness_auto", "light": "light_mode", "dark": "dark_mode"}
_MOST_NAMES = 2000  # metrics in the list to choose from; an expression finds the others

ui.echart  # noqa: B018  the attribute's first use makes the page able to import ECharts


class Live(Element, component="static/live.js"):  # type: ignore[call-arg, misc]
    """Everything below the bar."""

    def __init__(self, desk: str):
        super().__init__()
        self._props["desk"] = desk


def build(follower: Follower, desks: weakref.WeakValueDictionary[str, Desk]) -> None:
    """Make the page known to NiceGUI; `desks` gets each open page's view, by the name that its socket will give."""
    app.add_static_files("/instrument", STATIC)

    @ui.page("/", title="instrument")
    def index(request: Request) -> None:
        desk = Desk(View.of_query(request.url.query))
        name = secrets.token_urlsafe(12)
        desks[name] = desk
        # The client's own attribute keeps the desk for as long as the page is open, and no longer.
        ui.context.client.instrument_desk = desk  # type: ignore[attr-defined]
        ui.add_head_html('<link rel="stylesheet" href="/instrument/live.css">')
        _Bar(desk, follower)
        Live(name)


class _Bar:
    """The controls of one page."""

    def __init__(self, desk: Desk, follower: Follower):
        self._desk, self._follower = desk, follower
        view = desk.view
        self._dark = ui.dark_mode(_dark(view.theme))
        with ui.header(elevated=False).classes("iv-top"):
            ui.label("instrument").classes("iv-logo")
            with ui.element("div").classes("iv-controls"):
                self._runs = self._select("Runs (none: the newest)", "iv-runs",
                                          lambda value: self._set(runs=value[:MOST_RUNS]),
                                          self._run_names(), list(view.runs), several=True)
                self._picks = self._select("More charts: name or regex", "iv-picks",
                                           self._set_picks, self._metric_names(), list(view.picks), several=True, new=True)
                self._x = self._select("X axis", "iv-x", lambda value: self._set(x=value), dict(X_AXES), view.x)
                self._window = self._select("Steps", "iv-window", self._set_window, _windows(view), _window(view))
                self._smooth = self._select("Smoothing", "iv-smooth", lambda value: self._set(smooth=value),
                                            _smoothing(view), view.smooth)
                self._reset = ui.button("Whole run", icon="zoom_out_map", on_click=lambda: self._set(first=None, last=None)) \
                    .props("flat dense no-caps").classes("iv-reset")
                self._theme = ui.button(icon=_ICONS[view.theme], on_click=self._next_theme).props("flat dense round") \
                    .classes("iv-theme")
        self._runs.on("focus", self._refresh)
        self._picks.on("focus", self._refresh)
        desk.listeners.append(self._show)
        self._show()

    def _select(self, label: str, classes: str, change: Any, options: Any, value: Any, *, several: bool = False,
                new: bool = False) -> ui.select:
        select = ui.select(options, label=label, value=value, multiple=several, with_input=several,
                           new_value_mode="add-unique" if new else None, clearable=several,
                           on_change=lambda event: change(tuple(event.value or ()) if several else event.value))
        # Quasar's own chips: their text is text.
        return select.classes(classes).props("outlined dense options-dense" + (" use-chips" if several else ""))

    def _set(self, **changes: Any) -> None:
        self._desk.view = replace(self._desk.view, **changes)

    def _set_window(self, value: Any) -> None:
        if value != -1:
            self._set(window=int(value or 0), first=None, last=None)

    def _set_picks(self, value: tuple[str, ...]) -> None:
        kept = tuple(pick for pick in value if len(pick) <= LENGTH)[:MOST_PICKS]
        if kept != value:  # an address does not keep what is left out
            ui.notify(f"A page has {MOST_PICKS} chosen charts at most." if len(value) > MOST_PICKS else
                      f"A name or an expression has {LENGTH} characters at most, and this one has {max(map(len, value))}.",
                      type="warning", timeout=10_000)
            self._picks.value = list(kept)
        self._set(picks=kept)

    def _next_theme(self) -> None:
        self._set(theme=THEMES[(THEMES.index(self._desk.view.theme) + 1) % len(THEMES)])

    def _refresh(self) -> None:
        self._runs.set_options(self._run_names(), value=list(self._desk.view.runs))
        self._picks.set_options(self._metric_names(), value=list(self._desk.view.picks))

    def _show(self) -> None:
        """Bring the controls to where the view is, which the charts may have moved."""
        view = self._desk.view
        self._window.set_options(_windows(view), value=_window(view))
        self._reset.set_visibility(view.first is not None)
        self._dark.value = _dark(view.theme)
        self._theme.props(f'icon={_ICONS[view.theme]} aria-label="Theme: {view.theme}. Change"')
        for control, value in ((self._x, view.x), (self._smooth, view.smooth)):
            if control.value != value:
                control.value = value

    def _run_names(self) -> list[str]:
        return list(dict.fromkeys([*self._desk.view.runs, *self._follower.found]))

    def _metric_names(self) -> list[str]:
        runs = filter(None, map(self._follower.known, self._desk.view.runs or self._follower.found))
        return _unique(self._desk.view.picks, *(run.store.names() for run in runs))


def _unique(*names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for each in names for name in each))[:_MOST_NAMES]


def _dark(theme: str) -> bool | None:
    return {"auto": None, "light": False, "dark": True}[theme]


def _windows(view: View) -> dict[int, str]:
    windows = {each: f"Last {each:,}" if each else "Whole run" for each in sorted({*WINDOWS, view.window})}
    return {-1: "Zoomed in", **windows} if view.first is not None else windows


def _window(view: View) -> int:
    return -1 if view.first is not None else view.window


def _smoothing(view: View) -> dict[int, str]:
    named = {AUTO: "Automatic", 0: "None"}
    return {each: named.get(each) or f"Mean of {each:,} steps" for each in sorted({*SMOOTHING, view.smooth})}
