"""Which tests passed on which release: the table in the README, from what `nox` left.

    nox -s tests -- -m "core or options"     # or all, without -m; each session leaves .nox/results/<release>.xml
    nox -s mindformers
    python benchmarks/matrix.py              # prints the table, and puts it into README.md between its two marks

A test is counted under the mode that its name has, graph or PyNative, and under "either" where it has none. Nothing is written
where a test failed: the table says what passed.
"""
from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / ".nox" / "results"
BEGIN, END = "<!-- made by benchmarks/matrix.py -->", "<!-- end -->"
MODES = ("graph", "pynative", "either")


def counts(file: Path) -> tuple[dict[str, Counter], list[str]]:
    """`{mode: {passed, skipped}}` of one session, and the names of the tests that failed."""
    found, failed = {mode: Counter() for mode in MODES}, []
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        parameters = re.split(r"[\[\]-]", case.get("name", ""))
        mode = next((mode for mode in MODES[:2] if mode in parameters), "either")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        found[mode]["skipped" if case.find("skipped") is not None else "passed"] += 1
    return found, failed


def table(files: list[Path]) -> tuple[str, list[str]]:
    """Markdown, and what failed."""
    lines = ["| release | graph | PyNative | either |", "|---|---|---|---|"]
    failures = []
    for file in files:
        found, failed = counts(file)
        failures += [f"{file.stem}: {name}" for name in failed]
        cells = [str(found[mode]["passed"]) + (f" (and {found[mode]['skipped']} skipped)" if found[mode]["skipped"] else "")
                 for mode in MODES]
        lines.append(f"| {file.stem.replace('-', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines), failures


def main() -> int:
    files = sorted(RESULTS.glob("*.xml"),
                   key=lambda file: (not file.stem.startswith("MindSpore"), Version(file.stem.split("-")[1])))
    if not files:
        print(f"no results in {RESULTS}; run nox -s tests first", file=sys.stderr)
        return 1
    text, failures = table(files)
    print(text)
    if failures:
        print("not written, since these failed:", *failures, sep="\n", file=sys.stderr)
        return 1
    readme = ROOT / "README.md"
    before, rest = readme.read_text("utf-8").split(BEGIN)
    readme.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.split(END, 1)[1], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
