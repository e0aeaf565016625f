"""From a block of YAML to options: defaults for empty keys, and errors with near names for unknown ones."""
from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from instrument import _compat, alarms, writers
from instrument.histograms import Histogram
from instrument.step_options import StepOptions

_ALARMS = {name: getattr(alarms, name) for name in alarms.__all__
           if inspect.isclass(getattr(alarms, name)) and issubclass(getattr(alarms, name), alarms.Alarm)}
_WRITERS = [name for name in writers.__all__ if name.endswith("Writer") and name != "Writer"]

STEP_NAMES = tuple(field.name for field in fields(StepOptions))


def check_names(block: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """ValueError with near names for the first key that nobody knows."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
            raise ValueError(f"{block} has no setting {name!r}; near names: {', '.join(near) or 'none'}. "
                             f"All: {', '.join(sorted(known))}.")


def filled(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the empty ones, which stand for their defaults."""
    return {name: value for name, value in given.items() if value is not None}


def show(block: str, chosen: Mapping[str, Any]) -> None:
    """Print the settings that are in effect, on rank 0."""
    if _compat.rank_and_size()[0] == 0:
        print(f"{block}: " + ", ".join(f"{name}={value!r}" for name, value in chosen.items()), flush=True)


def with_objects(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the monitor with the alarms and writers that mappings with a `type` stand for."""
    made = dict(given)
    if given.get("alarms") in ("none", "None"):
        made["alarms"] = []
    elif isinstance(given.get("alarms"), (list, tuple)):
        made["alarms"] = [_made("an entry of `alarms`", each, _ALARMS) for each in given["alarms"]]
    if isinstance(given.get("writers"), (list, tuple)):
        made["writers"] = [_made("an entry of `writers`", each, _WRITERS) for each in given["writers"]]
    return made


def _made(block: str, given: Any, kinds: Collection[str]) -> Any:
    if not isinstance(given, Mapping):
        return given
    kind = str(given.get("type"))
    if kind not in kinds:
        near = difflib.get_close_matches(kind, sorted(kinds), n=3, cutoff=0.5)
        raise ValueError(f"{block} has the type {kind!r}; near names: {', '.join(near) or 'none'}. All: "
                         f"{', '.join(sorted(kinds))}.")
    cls = kinds[kind] if isinstance(kinds, Mapping) else getattr(writers, kind)
    own = {name: value for name, value in given.items() if name != "type"}
    check_names(f"{block} of the type {kind}", own, set(inspect.signature(cls.__init__).parameters) - {"self"})
    return cls(**filled(own))


def step_options(given: Mapping[str, Any]) -> StepOptions:
    """Options of a step from those of the settings that are some.

    `activations: none` measures no cell, since an empty key means the default. A histogram is a mapping with the keys `kind`,
    `pattern` and `every`.
    """
    chosen = {name: value for name, value in filled(given).items() if name in STEP_NAMES}
    if chosen.get("activations") in ("none", "None"):
        chosen["activations"] = None
    for name in ("activations", "activation_stats"):
        if isinstance(chosen.get(name), (list, tuple)):
            chosen[name] = list(chosen[name])
    if isinstance(chosen.get("histograms"), (list, tuple)):
        chosen["histograms"] = [_histogram(each) for each in chosen["histograms"]]
    return StepOptions(**chosen)


def _histogram(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    names = tuple(field.name for field in fields(Histogram))
    check_names("an entry of `histograms`", given, names)
    return Histogram(**filled(given))
