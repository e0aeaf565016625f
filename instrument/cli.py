"""The console script `instrument`.

Owns arguments and messages; the work of a command lies in the module that it loads. MindSpore is not imported before a
command needs it, so `--help` is quick and works without it.
"""
from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from instrument import runs

QUICKSTART = "instrument._quickstart"  # in a wheel: a copy of examples/01_quickstart.py


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; those of this process by default.

    Returns:
        The exit status: 0, or 1 where the command could not do its work. Wrong arguments leave by SystemExit(2).
    """
    args = _parser().parse_args(argv)
    try:
        args.command(args)
    except _Refused as refused:
        print(f"instrument {args.name}: {refused}", file=sys.stderr)
        return 1
    return 0


class _Refused(Exception):
    """The command cannot run; the message says what to do."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="instrument", description="See inside MindSpore training while it runs.")
    version = runs.version_of("mindspore-instrument") or "of a source checkout, not installed"
    parser.add_argument("--version", action="version", version=f"instrument {version}")
    commands = parser.add_subparsers(title="commands", dest="name", required=True)
    demo = commands.add_parser(
        "demo", help="train a small GPT on a CPU, record every step, and show it",
        description="Train a small character-level GPT on the Python standard library's own source text, on a CPU, and "
                    "record every step for TensorBoard and as JSON Lines. 200 steps take about a minute on two cores.")
    demo.add_argument("--steps", type=_positive, default=200, metavar="N", help="training steps (default: %(default)s)")
    demo.add_argument("--run-dir", metavar="DIR", help="directory of the new run (default: runs/demo-<date>-<time>)")
    demo.set_defaults(command=_demo)
    return parser


def _positive(text: str) -> int:
    number = int(text) if text.strip().lstrip("+-").isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but it is {text!r}")
    return number


def _demo(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("mindspore") is None:
        raise _Refused("MindSpore is not installed. For its build for CPU:\n\n"
                       '    pip install "mindspore-instrument[mindspore]"\n\n'
                       "For Ascend or GPU, install the build that goes with the machine.")
    try:
        if args.run_dir is not None:
            runs.check_new(args.run_dir)  # before MindSpore is loaded, which takes seconds
        _quickstart().main(args.steps, args.run_dir)
    except OSError as error:
        raise _Refused(str(error)) from error


def _quickstart() -> ModuleType:
    """The module of examples/01_quickstart.py: the wheel's copy, else the checkout's file."""
    file = Path(__file__).parents[1] / "examples" / "01_quickstart.py"
    if importlib.util.find_spec(QUICKSTART) is not None or not file.exists():
        return importlib.import_module(QUICKSTART)
    spec = importlib.util.spec_from_file_location(QUICKSTART, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[QUICKSTART] = module  # the graph compiler imports the module of a construct by its name
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
