"""The test suite on every supported MindSpore release, and the static checks.

    nox -l                                   # what there is
    nox -s "tests(2.7.0)"                    # the whole suite on one release
    nox -s tests -- -m core                  # the core tests on all of them
    nox -s "mindformers(1.9.0)"              # what MindSpore Transformers needs, on one of its releases
    nox -s dashboard                         # the live view, in a browser; MINDSPORE_PYTHON: a Python that can train
    nox -s clients                           # writers, with the real clients
    nox -s docs                              # the manual and the reference, as pages
    nox -s lint types

A session whose interpreter is missing is skipped, and says so.
"""
from __future__ import annotations

import shutil

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
# MindFormers release: Python, the MindSpore that it is tested with, and what must be held back.
MINDFORMERS = {
    "2.1.0": ("3.10", "2.9.0"),  # by --no-deps over what 1.9.0 needs
    "1.9.0": ("3.10", "2.9.0"),
    "1.7.0": ("3.10", "2.7.1"),
    "1.6.0": ("3.10", "2.7.0"),
    "1.3.2": ("3.10", "2.7.0"),
    "0.8.0": ("3.9", "2.0.0", "pillow<10"),
}
SOURCES = ("instrument", "tests", "examples", "benchmarks", "noxfile.py")


def result(name: str) -> str:
    """The argument by which pytest leaves its result for benchmarks/matrix.py."""
    return f"--junitxml=.nox/results/{name}.xml"


@nox.session
@nox.parametrize("python,mindspore", [nox.param(python, release, id=release) for release, (python, *_) in RELEASES.items()])
def tests(session: nox.Session, mindspore: str) -> None:
    """The suite; arguments after `--` go to pytest."""
    session.install(".[mindspore,dev]", f"mindspore=={mindspore}", *RELEASES[mindspore][1:])
    session.run("pytest", result(f"MindSpore-{mindspore}"), *session.posargs, env={"GLOG_v": "3"})


@nox.session
@nox.parametrize("python,mindformers",
                 [nox.param(python, release, id=release) for release, (python, *_) in MINDFORMERS.items()])
def mindformers(session: nox.Session, mindformers: str) -> None:
    """Training by MindSpore Transformers' own Trainer."""
    _, mindspore, *held = MINDFORMERS[mindformers]
    complete = "1.9.0" if mindformers == "2.1.0" else mindformers
    session.install(".", f"mindformers=={complete}", f"mindspore=={mindspore}", "setuptools<81",  # for its pkg_resources
                    "hypothesis>=6", "pytest>=8", *held)
    if complete != mindformers:
        session.install("--no-deps", f"mindformers=={mindformers}")
    session.run("pytest", "tests/mf", result(f"MindFormers-{mindformers}"), *session.posargs, env={"GLOG_v": "3"})


@nox.session
def dashboard(session: nox.Session) -> None:
    """The live view, where MindSpore is not installed, as on the machine of somebody who only looks. Needs a browser."""
    session.install(".[dashboard]", "hypothesis>=6", "pytest>=8", "playwright>=1.40", "websockets>=13")
    if not any(map(shutil.which, ("chromium", "chromium-browser"))):
        session.run("playwright", "install", "chromium")
    # tests/conftest.py is for those that train.
    session.run("pytest", "tests/dashboard", "--confcutdir=tests/dashboard", *session.posargs,
                env={"TEST_BROWSER": "required"})


@nox.session(python="3.11")
def clients(session: nox.Session) -> None:
    """The writers of Weights & Biases, MLflow, SwanLab and Prometheus, with the real clients; offline."""
    session.install(".[mindspore,dev,clients]")
    session.run("pytest", "tests/test_writers_clients.py", "tests/test_prometheus_server.py",
                "tests/test_readme.py::test_weights_and_biases_is_written_offline", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The manual and the reference as pages that work offline: .nox/site/html/index.html."""
    session.install("mkdocs-material>=9", "mkdocstrings[python]>=0.24")
    session.run("python", ".ci/site/pages.py")
    session.run("mkdocs", "build", "--strict", "-f", ".ci/site/mkdocs.yml", env={"NO_MKDOCS_2_WARNING": "1"})


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
