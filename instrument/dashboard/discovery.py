"""Which directories are runs, under what name, and which may be read.

Owns the names by which browsers ask for runs. A browser never names a path: what it asks for is looked up among the runs that
were found below the directories that the server was given, links that lead out of these not followed.
"""
from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path

from instrument import runs
from instrument.dashboard.tail import read_small

# Of what is below a directory no more is looked at: somebody may serve a home directory.
_DEPTH, _DIRECTORIES, _RUNS = 5, 20_000, 2_000


class Directories:
    """The directories that a server shows.

    Args:
        paths: Runs, or directories of runs; those that do not exist yet are looked for again.

    Attributes:
        roots: The same, with links resolved.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]):
        self.roots = list(dict.fromkeys(Path(path).resolve() for path in paths))
        self._labels = _told_apart(self.roots)

    def find(self) -> dict[str, Path]:
        """`{name: directory}` of the runs that there are now, by name.

        A name is the path below the given directory; with the end of that directory's path where several were given, or
        where that is the run.
        """
        found: dict[str, Path] = {}
        for root, label in zip(self.roots, self._labels):
            for run in _below(root):
                inside = run.relative_to(root).as_posix()
                name = label if inside == "." else inside if len(self.roots) == 1 else f"{label}/{inside}"
                name = name.encode("utf-8", "replace").decode() or "run"
                number = 2
                while found.get(name, run) != run:
                    name, number = f"{name} ({number})" if number == 2 else f"{name.rsplit(' (', 1)[0]} ({number})", number + 1
                found[name] = run
        return dict(sorted(found.items()))


def _told_apart(roots: Sequence[Path]) -> list[str]:
    """The end of each path, as long as it must be to be no other's: a run has one name, whatever other runs come and go."""
    labels = [root.name for root in roots]
    length = 1
    while len(set(labels)) < len(labels) and length < max(len(root.parts) for root in roots):
        length += 1
        labels = ["/".join(root.parts[-length:]).strip("/") if labels.count(label) > 1 else label
                  for root, label in zip(roots, labels)]
    return labels


def _below(root: Path) -> list[Path]:
    """The runs at and below a directory, breadth first, so that of too many those nearest are there."""
    found: list[Path] = []
    level, looked_at = [root], 0
    for _ in range(_DEPTH + 1):
        deeper: list[Path] = []
        for directory in level:
            looked_at += 1
            if looked_at > _DIRECTORIES or len(found) >= _RUNS:
                return found
            try:
                with os.scandir(directory) as entries:
                    names = sorted(entries, key=lambda entry: entry.name)
                if _is_run(directory, [entry.name for entry in names]):
                    found.append(directory)
                # A link to a directory could lead out, or round in a circle.
                deeper += [directory / entry.name for entry in names
                           if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)]
            except OSError:
                continue
        level = deeper
    return found


def _is_run(directory: Path, names: Sequence[str]) -> bool:
    if any(fnmatch.fnmatchcase(name, runs.METRICS) for name in names):
        return True
    # A run that has just begun has nothing else; but so have directories of models.
    return runs.CONFIG in names and b'"start_time"' in (read_small(directory / runs.CONFIG) or b"")
