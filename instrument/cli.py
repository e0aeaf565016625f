"""The console script `instrument`.

Owns arguments and messages; the work of a command lies in the module that it loads. MindSpore is not imported before a
command needs it, so `--help` is quick and works without it.
"""
from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from instrument import runs

_DASHBOARD = ('NiceGUI is not installed. For the live view and for reports:\n\n'
              '    pip install "mindspore-instrument[dashboard]"\n\nor, in a clone, pip install ".[dashboard]".')
_MINDSPORE = ('MindSpore is not installed. For its build for CPU:\n\n    pip install "mindspore-instrument[mindspore]"\n\n'
              'or, in a clone, pip install ".[mindspore]". '
              "For Ascend or GPU, install the build that goes with the machine.")
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
    _add_checks(commands)
    compare = commands.add_parser(
        "compare", help="what two or more runs reached, how fast, where they part",
        description="Print a table of runs side by side: last and best values, throughput, the step at which the loss leaves "
                    "that of the first run, alarms, and the hyper-parameters that differ.")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="run directories, two or more")
    compare.add_argument("-o", "--output", metavar="FILE", help="write the report of these runs too")
    compare.set_defaults(command=_compare)
    board = commands.add_parser(
        "tensorboard", help="start TensorBoard on the next free port",
        description="Start TensorBoard on the next free port; it ends with this command.")
    board.add_argument("directory", nargs="?", default="runs", metavar="RUNS", help="directory of runs (default: %(default)s)")
    board.add_argument("--port", type=_port, default=6006, metavar="N",
                       help="port, or the next free one where it is in use (default: %(default)s)")
    board.set_defaults(command=_tensorboard)
    _add_serve(commands)
    report = commands.add_parser(
        "report", help="write runs into one HTML file that replays them offline",
        description="Write one HTML file that shows runs as the live page does, without a server and without internet.")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    report.add_argument("-o", "--output", default="report.html", metavar="FILE", help="the file (default: %(default)s)")
    report.set_defaults(command=_report)
    tail = commands.add_parser(
        "tail", help="watch a run in the terminal, from its files",
        description="Show a run in the terminal while it trains in another process, until it ends. In a pipe or a file these "
                    "are plain lines.")
    tail.add_argument("run", metavar="RUN", help="run directory, or a directory of runs, of which the newest is shown")
    tail.set_defaults(command=_tail)
    mindformers = commands.add_parser(
        "mindformers", help="print the folder for REGISTER_PATH of MindSpore Transformers",
        description="Print the folder in which MindSpore Transformers finds what a line auto_register in YAML names: for the "
                    "environment variable REGISTER_PATH, or the argument --register_path of run_mindformer.py.")
    mindformers.set_defaults(command=_mindformers)
    return parser


def _add_checks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor", help="say what is installed, what does not go together, and which options work on this device",
        description="Print versions, what is known not to go together and the line that mends it; then train a tiny network "
                    "with each option on this machine's device, in graph and in PyNative mode, and hold its numbers against "
                    "NumPy. Takes half a minute to a minute. The exit status is 1 where something is wrong.")
    doctor.add_argument("--versions", action="store_true", help="versions alone, without training")
    bench = commands.add_parser(
        "bench", help="measure on this machine what each option costs",
        description="Train a GPT by nn.TrainOneStepCell and by InstrumentedStep with several options, in turn, on this "
                    "machine's device, and print what each costs: the ratio of times of steps that ran one after the other.")
    bench.add_argument("--seconds", type=_positive, default=60, metavar="N",
                       help="how long to measure, after compiling (default: %(default)s)")
    bench.add_argument("--size", choices=("0.5M", "5M", "25M"), default="5M", help="parameters (default: %(default)s)")
    bench.add_argument("--mode", choices=("graph", "pynative"), default="graph", help="(default: %(default)s)")
    doctor.set_defaults(command=_doctor)
    bench.set_defaults(command=_bench)
    for parser in (doctor, bench):
        parser.add_argument("--device", choices=("Ascend", "GPU", "CPU"), help="by default, the one that MindSpore takes")


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve", help="watch runs in a browser, live",
        description="Serve a page that shows runs while they train, and afterwards. It reads run directories and nothing "
                    "else, needs no internet, and training neither waits for it nor ends with it.")
    serve.add_argument("runs", nargs="*", default=["runs"], metavar="RUNS",
                       help="run directories, or directories of them (default: runs)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at; others than %(default)s need --token")
    serve.add_argument("--port", type=_port_or_any, default=8765, metavar="N",
                       help="port, or the next free one where it is in use (default: %(default)s)")
    serve.add_argument("--token", metavar="SECRET", default=os.environ.get("INSTRUMENT_TOKEN"),
                       help="what a browser must know, 8 characters or more; $INSTRUMENT_TOKEN by default, which other users "
                            "of this machine do not see")
    serve.set_defaults(command=_serve)


def _positive(text: str) -> int:
    number = int(text) if text.strip().lstrip("+-").isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but it is {text!r}")
    return number


def _port(text: str, *, least: int = 1) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to 65535, but it is {text!r}")
    return int(text)


def _port_or_any(text: str) -> int:
    return _port(text, least=0)


def _serve(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("nicegui") is None:
        raise _Refused(_DASHBOARD)
    from instrument.dashboard import server

    try:
        server.serve(args.runs, host=args.host, port=args.port, token=args.token, announce=_say)
    except (ValueError, OSError) as error:
        raise _Refused(str(error)) from error


def _report(args: argparse.Namespace) -> None:
    from instrument.dashboard import report

    if not report.is_possible():
        raise _Refused(_DASHBOARD)
    try:
        found = report.write(args.runs, args.output)
    except (OSError, ValueError, RuntimeError) as error:
        raise _Refused(str(error)) from error
    print(f"{args.output}: {found} run{'' if found == 1 else 's'}. Open it in a browser.")


def _tail(args: argparse.Namespace) -> None:
    from instrument.dashboard import terminal
    from instrument.dashboard.discovery import Directories
    from instrument.dashboard.follow import Follower
    from instrument.reading import no_run
    from instrument.writers.console import ConsoleWriter
    from instrument.writers.console_parts import plain

    directory = Path(args.run).absolute()
    if not runs.holds_a_run(directory) and directory.is_dir():  # of a directory of runs, the newest
        follower = Follower(Directories([directory]))
        directory = follower.found.get(follower.newest(), directory)
    if not runs.holds_a_run(directory):
        raise _Refused(no_run(args.run, directory))
    try:
        writer = ConsoleWriter()
        print(f"The run has ended: {plain(terminal.tail(directory, writer, live=writer.console.is_terminal))}.")
    except KeyboardInterrupt:
        print()


def _demo(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("mindspore") is None:
        raise _Refused(_MINDSPORE)
    try:
        if args.run_dir is not None:
            runs.check_new(args.run_dir)  # before MindSpore is loaded, which takes seconds
        quickstart().main(args.steps, args.run_dir)
    except OSError as error:
        raise _Refused(str(error)) from error


def _compare(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from instrument.comparison import Comparison
    from instrument.reading import read
    from instrument.writers.console_parts import plain

    try:
        comparison = Comparison([read(run) for run in args.runs])
    except (FileNotFoundError, ValueError) as error:
        raise _Refused(str(error)) from error
    table = Table(box=None, pad_edge=False)
    for name in ("", *comparison.names):
        table.add_column(Text(plain(name)), overflow="fold")
    for row in comparison.rows:
        table.add_row(*(Text(plain(cell)) for cell in (row.name, *row.cells)))
    Console().print(table)
    if args.output is not None:
        _report(args)


def _tensorboard(args: argparse.Namespace) -> None:
    from instrument import tensorboard_server

    if not tensorboard_server.is_installed():
        raise _Refused("TensorBoard is not installed:\n\n    pip install tensorboard")
    if not Path(args.directory).is_dir():
        raise _Refused(f"there is no directory {args.directory!r}. Give the one that holds the runs.")
    try:
        status = tensorboard_server.run(args.directory, args.port, _say)
    except OSError as error:
        raise _Refused(str(error)) from error
    if status != 0:
        raise _Refused(f"TensorBoard ended with the exit status {status}.")


def _doctor(args: argparse.Namespace) -> None:
    from instrument import doctor_report

    if not doctor_report.show(device=args.device, trials=not args.versions):
        raise _Refused("something does not work here; see above.")


def _bench(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("mindspore") is None:
        raise _Refused(_MINDSPORE)
    from instrument import bench

    bench.main(args.seconds, args.mode, args.device, args.size)


def _mindformers(args: argparse.Namespace) -> None:
    print(Path(__file__).parent / "mindformers" / "register")  # without importing MindFormers, which prints much


def _say(line: str) -> None:
    print(line, flush=True)  # whoever started this in the background reads the address from a file


def quickstart() -> ModuleType:
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
