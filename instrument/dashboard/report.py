"""`write`: runs as one HTML file that replays them offline: the page's own charts, with their points in the file.

Owns what is in the file. The charts are those of the live page, made by the same `Session` for a reader who sees everything at
once; ECharts is taken from the installed NiceGUI, which is not imported. `static/report.js` stands in for the server.
"""
from __future__ import annotations

import html
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import orjson

from instrument.dashboard.discovery import Directories
from instrument.dashboard.run import Run
from instrument.dashboard.session import Session
from instrument.dashboard.view import MOST_RUNS, View

STATIC = Path(__file__).parent / "static"
# The file asks nobody for anything: what it needs is in it.
_POLICY = "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'"
# What can be chosen in a list has charts of its own in the file; so many at most.
_CHOICES = 24


class _Runs:
    """What a session asks of a `Follower`, for runs that were read as a whole."""

    def __init__(self, directories: dict[str, Path]):
        self.found = directories
        self._runs = {name: Run(name, path) for name, path in directories.items()}
        for run in self._runs.values():
            run.read_history(lambda: None)

    def look_again(self) -> None:
        """There is nothing new."""

    def run(self, name: str) -> Run | None:
        return self._runs.get(name)


def write(paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> int:
    """Write the report.

    Args:
        paths: Run directories, or directories of them.
        output: The file; one that is there is replaced.

    Returns:
        How many runs are in it.

    Raises:
        FileNotFoundError: There is no run at one of the paths.
        ValueError: There are more runs than a page shows.
        OSError: The file cannot be written.
    """
    found: dict[str, Path] = {}
    for path in paths:
        there = Directories([path]).find()
        if not there:
            raise FileNotFoundError(f"no run in {os.fspath(path)!r}. Give run directories, or directories that hold some.")
        for name, directory in there.items():
            while found.get(name, directory) != directory:
                name = f"{directory.parent.name}/{name}"
            found[name] = directory
    ranks = {name for name, path in found.items() if path.parent in found.values()}  # rank_1 and so on, below their run
    if len(found) - len(ranks) <= MOST_RUNS:
        found = {name: path for name, path in found.items() if name not in ranks}
    if len(found) > MOST_RUNS:
        raise ValueError(f"there are {len(found)} runs, and a report shows {MOST_RUNS} at most. Name those to be in it.")
    content = page(found)
    file = Path(output)
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, file)
    return len(found)


def page(found: dict[str, Path]) -> bytes:
    """The file of these runs, `{name: directory}`."""
    title = ", ".join(found)
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    main, chunk = _echarts()
    scripts = "\n".join(_inlined(name) for name in ("plot.js", "live.js", "report.js"))
    content = orjson.dumps(stored(found), option=orjson.OPT_SERIALIZE_NUMPY).decode()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{html.escape(title)}</title>
<style>
{(STATIC / "live.css").read_text("utf-8")}
body {{ margin: 0; }} .iv-top {{ display: flex; }} .iv-top > * {{ flex: none; }} .iv-id-heat .iv-slider {{ display: none; }}
</style>
</head>
<body class="body--light">
<div class="iv-top"><span class="iv-logo">instrument</span><span class="iv-note">written {made}</span>
<span class="iv-tools"><button type="button" id="whole">Whole run</button>
<button type="button" id="theme">Light or dark</button></span></div>
<main id="page" class="iv"></main>
<script type="application/json" id="stored">{_safe(content)}</script>
<script type="text/plain" id="echarts-chunk">{_safe_script(chunk)}</script>
<script type="text/plain" id="echarts-main">{_safe_script(main)}</script>
<script type="module">
const echarts = await (async () => {{
  const text = (id) => document.getElementById(id).textContent;
  const at = (source) => URL.createObjectURL(new Blob([source], {{ type: "text/javascript" }}));
  const chunk = at(text("echarts-chunk"));
  return (await import(at(text("echarts-main").replace("CHUNK", chunk)))).echarts;
}})();
{scripts}
</script>
</body>
</html>
""".encode()


def stored(found: dict[str, Path]) -> dict[str, Any]:
    """What the page of the report knows.

    Returns:
        `message`: the first message of a session. `heat` and `histogram`: for each choice in their lists, the charts that
        change. `scales`: for each chart of curves, its other y axes, linear or logarithmic.
    """
    follower: Any = _Runs(found)
    view = View(runs=tuple(found))
    message = Session(follower, view).message()
    message.pop("address", None)
    specs = {spec["id"]: spec for spec in message.get("layout", ())}
    choices: dict[str, dict[str, Any]] = {"heat": {}, "histogram": {}}
    for id, changing in (("heat", ("heat", "profile")), ("histogram", ("histogram", "bins"))):
        spec = specs.get(id)
        if spec is not None:
            kept = [each for each in spec["choices"] if each != spec["chosen"]][:_CHOICES - 1]
            spec["choices"] = [each for each in spec["choices"] if each in kept or each == spec["chosen"]]
            for choice in kept:
                session = Session(follower, replace(view, **{id: choice}))  # type: ignore[arg-type]
                session.visible = set(changing)
                choices[id][choice] = {name: chart for name, chart in session.message().get("charts", {}).items()
                                       if name in changing}
    curves = tuple(id for id, spec in specs.items() if spec["kind"] == "lines")
    scales = {}
    for id in curves:
        session = Session(follower, replace(view, scales=(id,)))
        session.visible = {id}
        chart = session.message().get("charts", {}).get(id)
        if chart is not None:
            scales[id] = {"yAxis": chart["option"]["yAxis"], "log": chart["extra"]["log"]}
    return {"message": message, **choices, "scales": scales}


def is_possible() -> bool:
    """Whether ECharts is there: NiceGUI is installed."""
    return importlib.util.find_spec("nicegui") is not None


def _echarts() -> tuple[str, str]:
    """The module that exports `echarts`, with CHUNK for the address of the other one, and that one."""
    found = importlib.util.find_spec("nicegui")
    assert found is not None and found.submodule_search_locations
    directory = Path(found.submodule_search_locations[0]) / "elements" / "echart" / "dist"
    main = (directory / "index.js").read_text("utf-8")
    names = re.findall(r'from\s*"\./([\w.-]+\.js)"', main)
    if len(names) != 1:
        raise RuntimeError("the installed NiceGUI keeps ECharts in another way than this release knows: pip install "
                           '"mindspore-instrument[dashboard]"')
    return main.replace(f'"./{names[0]}"', '"CHUNK"'), (directory / names[0]).read_text("utf-8")


def _inlined(name: str) -> str:
    """A module of the page without its imports and exports: in the report all are one."""
    source = (STATIC / name).read_text("utf-8")
    source = re.sub(r"^import .*;$", "", source, flags=re.MULTILINE)
    source = re.sub(r"^export default \{.*\Z", "", source, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^export ", "", source, flags=re.MULTILINE)


def _safe(document: str) -> str:
    """JSON that ends no script element, whatever texts it holds."""
    return document.replace("<", "\\u003c")


def _safe_script(source: str) -> str:
    if re.search(r"</script|<!--", source, re.IGNORECASE):
        source = re.sub(r"</(script)", r"<\\/\1", source, flags=re.IGNORECASE).replace("<!--", "<\\!--")
    return source
