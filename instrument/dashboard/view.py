"""`View`: what one browser looks at, and the same as the query of an address, so that a link shows what its sender saw.

Nothing of an address is believed: what is unknown or out of range is left out, and numbers and lists are bounded.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from urllib.parse import parse_qsl, urlencode

X_AXES = {"step": "Step", "time": "Time since start", "clock": "Time of day"}
AUTO = -1  # smoothing of what is drawn with fewer points than there are
SMOOTHING = (AUTO, 0, 10, 50, 100, 500, 1000, 5000)
WINDOWS = (0, 100, 1000, 10_000, 100_000)
THEMES = ("auto", "light", "dark")
MOST_RUNS, MOST_PICKS, MOST_CHANGES, LENGTH, _LARGEST = 8, 12, 50, 300, 1 << 53
_MOST_FIELDS = 200  # of an address: more than a view has


@dataclass(frozen=True)
class View:
    """What is shown.

    Attributes:
        runs: Names of runs; the first one is that of the heat map, the histograms and the texts.
        x: One of `X_AXES`.
        first, last: Range of steps, or on an axis of time what `curves.of_axis` returns; None for the ends of the runs.
        window: Only so many steps at the end, which moves with the run; 0 for no window.
        smooth: Steps that each point of a curve is the mean of; 0 for none, `AUTO` for some where there are many steps.
        scales: Charts whose scale is not the usual one: linear where that is logarithmic, and the other way.
        picks: Names or regular expressions of metrics, one chart each.
        heat: The statistic of the heat map, such as `activation/rms`; empty for the first one there is.
        at: The step of the layers' profile and the single histogram; None for the newest.
        histogram, text: Name of the histogram and of the texts shown; empty for the first one, and for all.
        hidden: Curves that are switched off, each as `chart|entry of its legend`.
        large: The chart that has the whole width; empty for none.
        filter: What names in the table of values must contain.
        theme: One of `THEMES`.
    """

    runs: tuple[str, ...] = ()
    x: str = "step"
    first: int | None = None
    last: int | None = None
    window: int = 0
    smooth: int = AUTO
    scales: tuple[str, ...] = ()
    picks: tuple[str, ...] = ()
    heat: str = ""
    at: int | None = None
    histogram: str = ""
    text: str = ""
    hidden: tuple[str, ...] = ()
    large: str = ""
    filter: str = ""
    theme: str = "auto"

    def zoomed(self, first: float | None, last: float | None) -> View:
        """The same in a range of steps, the whole for None."""
        if first is None or last is None:
            return replace(self, first=None, last=None, window=0)
        low, high = sorted((round(max(first, 0)), round(max(last, 0))))
        return replace(self, first=low, last=max(high, low + 1), window=0)

    def query(self) -> str:
        """The query of the address, `?run=a&smooth=100`; empty where all is as usual."""
        pairs: list[tuple[str, str]] = []
        for name, key, several in _KEYS:
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                pairs += [(key, str(each)) for each in (value if several else [value])]
        return "?" + urlencode(pairs, safe="/") if pairs else ""

    @classmethod
    def of_query(cls, query: str) -> View:
        """The view that an address asks for; what makes no sense is left out."""
        given: dict[str, list[str]] = {}
        try:
            for key, value in parse_qsl(query.lstrip("?"), max_num_fields=_MOST_FIELDS):
                if len(value) <= LENGTH:
                    given.setdefault(key, []).append(value)
        except ValueError:
            return cls()
        number = {key: _whole(values[-1]) for key, values in given.items()}
        text = {key: values[-1] for key, values in given.items()}
        smooth = number.get("smooth")
        first, last = number.get("from"), number.get("to")
        view = cls(runs=_several(given.get("run"), MOST_RUNS), picks=_several(given.get("pick"), MOST_PICKS),
                   scales=_several(given.get("scale"), MOST_CHANGES), hidden=_several(given.get("hide"), MOST_CHANGES),
                   x=_one_of(given.get("x"), tuple(X_AXES)), window=number.get("window") or 0,
                   smooth=AUTO if smooth is None else min(smooth, 1_000_000), at=number.get("at"), heat=text.get("heat", ""),
                   histogram=text.get("histogram", ""), text=text.get("text", ""), large=text.get("large", ""),
                   filter=text.get("filter", ""), theme=_one_of(given.get("theme"), THEMES))
        return view if first is None or last is None else view.zoomed(first, last)


_DEFAULTS = {each.name: each.default for each in fields(View)}
# Attribute, its name in the address, and whether it has several values.
_KEYS = (("runs", "run", True), ("x", "x", False), ("first", "from", False), ("last", "to", False),
         ("window", "window", False), ("smooth", "smooth", False), ("scales", "scale", True), ("picks", "pick", True),
         ("heat", "heat", False), ("at", "at", False), ("histogram", "histogram", False), ("text", "text", False),
         ("hidden", "hide", True), ("large", "large", False), ("filter", "filter", False), ("theme", "theme", False))


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 17 and int(text) <= _LARGEST else None


def _several(values: Sequence[str] | None, most: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in values or () if value))[:most]


def _one_of(values: Sequence[str] | None, known: tuple[str, ...]) -> str:
    return values[-1] if values and values[-1] in known else known[0]
