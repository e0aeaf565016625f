"""The test suite on every supported MindSpore release, and the static checks.

    nox -l                                   # what there is
    nox -s "tests(2.7.0)"                    # the whole suite on one release
    nox -s tests -- -m core                  # the core tests on all of them
    nox -s lint types

A session whose interpreter is missing is skipped, and says so.
"""
from __future__ import annotations

import nox

nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True  # each holds about 2.7 GB

# MindSpore release: a Python that it has a build for, and what must be held back for it.
RELEASES = {
    "2.0.0": ("3.9", "pillow<10"),
    "2.7.0": ("3.9",),
    "2.7.1": ("3.10",),
    "2.7.2": ("3.10",),
    "2.8.0": ("3.10",),
    "2.9.0": ("3.10",),
    "2.10.0": ("3.11",),
}
SOURCES = ("instrument", "tests", "examples", "benchmarks", "noxfile.py")


@nox.session
@nox.parametrize("python,mindspore", [nox.param(python, release, id=release) for release, (python, *_) in RELEASES.items()])
def tests(session: nox.Session, mindspore: str) -> None:
    """The suite; arguments after `--` go to pytest."""
    session.install(".[mindspore,dev]", f"mindspore=={mindspore}", *RELEASES[mindspore][1:])
    session.run("pytest", *session.posargs, env={"GLOG_v": "3"})


@nox.session
def lint(session: nox.Session) -> None:
    """ruff."""
    session.install("ruff>=0.6")
    session.run("ruff", "check", *SOURCES)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, which needs no MindSpore."""
    session.install(".", "mypy>=1.8")
    session.run("mypy")
