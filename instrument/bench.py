"""What each option costs on this machine and device: `instrument bench`, and the same of a network of your own.

Owns how steps are compared: all of them live in one process and run in turn, plain and measured, in both orders, and a cost is
the median of the ratios of two that ran one after the other, because absolute times of a shared machine drift. A call that is
timed comes after another one of the same step, as in training: its weights are in the caches as far as they ever are. What
cannot be told apart from the plain step measured against itself is no cost.
"""
from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from rich.console import Console
from rich.table import Table

from instrument import _compat
from instrument.environment import hardware, versions
from instrument.gpt import GPT, SIZES, gpt_batch
from instrument.step import InstrumentedStep

__all__ = ["OPTIONS", "Cost", "costs", "machine", "seconds_of", "seconds_warm", "show"]

# None: the plain step once more, which says how much of a difference is noise.
OPTIONS: dict[str, dict[str, Any] | None] = {
    "the plain step again": None,
    "norms alone": {"activations": None, "attention": False},
    "the default: norms and blocks": {},
    "norms and leaves": {"activations": "leaves"},
    "the default, updates, moments": {"updates": True, "moments": True},
    "the default, every=10": {"every": 10},
}


@dataclass(frozen=True)
class Cost:
    """What one set of options costs.

    Attributes:
        name: As in the options.
        metrics: Elements of the vector; four bytes of each are copied to the host where a record is read.
        median: Of the ratios of the time of a call to that of the plain step's beside it.
        minimum: The least of these ratios.
        quartiles: The middle half of the ratios lies between these.
        pairs: How many ratios.
        compile_seconds: What the first calls took, with one step in them.
    """

    name: str
    metrics: int
    median: float
    minimum: float
    quartiles: tuple[float, float]
    pairs: int
    compile_seconds: float


def seconds_of(step: Callable[..., Any], batch: Sequence[Any], calls: int = 1) -> float:
    """Seconds of the clock for `calls` calls, until the last result is on the host."""
    start = time.perf_counter()
    for _ in range(calls):
        result = step(*batch)
    (result[1] if isinstance(result, tuple) else result).asnumpy()
    return time.perf_counter() - start


def seconds_warm(step: Callable[..., Any], batch: Sequence[Any], calls: int = 1) -> float:
    """As `seconds_of`, after a call that does not count, unless several are timed."""
    if calls == 1:
        seconds_of(step, batch)
    return seconds_of(step, batch, calls)


def costs(make: Callable[[], tuple[nn.Cell, nn.Cell]], batch: Sequence[Any], *,
          options: Mapping[str, dict[str, Any] | None] | None = None, seconds: float = 60.0, least: int = 5,
          tell: Callable[[str], None] = lambda line: None) -> tuple[float, list[Cost]]:
    """Compare steps of one network.

    Args:
        make: Returns a new `(network, optimizer)` at each call; the network returns the loss.
        batch: What the network takes.
        options: Arguments of `InstrumentedStep` by the name of the row; None for the plain step; by default `OPTIONS`.
        seconds: How long to measure, after everything has been compiled: a pair takes two calls of each.
        least: So many pairs are made of each, however long they take.
        tell: Called with what is being done.

    Returns:
        (seconds, costs): the median time of a call of `nn.TrainOneStepCell`, and one `Cost` for each of the options. With
        `every=k` a pair is k calls of each; above 100 it is one call, which is not measured.

    Examples:
        >>> def make():
        ...     net = nn.Dense(16, 2)
        ...     return nn.WithLossCell(net, loss_fn), nn.Adam(net.trainable_params())
        >>> second, (cost,) = costs(make, (x, y), options={"norms": {"activations": None}}, seconds=1)
        >>> cost.name, cost.metrics, cost.median > 0
        ('norms', 9, True)
    """
    options = OPTIONS if options is None else options
    plain, _ = _made(make, None, batch)
    steps, compile_seconds = {}, {}
    for name, arguments in options.items():
        tell(f"compiling {name}")
        steps[name], compile_seconds[name] = _made(make, arguments, batch)
    calls = {name: _calls(arguments) for name, arguments in options.items()}
    ratios: dict[str, list[float]] = {name: [] for name in options}
    times: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < least * len(options) or time.monotonic() < end:
        for name, step in steps.items():
            tell(f"measuring {name}, pair {len(ratios[name]) + 1}")
            is_plain_first = len(ratios[name]) % 2 == 0
            order = (plain, step) if is_plain_first else (step, plain)
            first, second = (seconds_warm(each, batch, calls[name]) for each in order)
            ratios[name].append(second / first if is_plain_first else first / second)
            times.append((first if is_plain_first else second) / calls[name])
    rows = [Cost(name=name, metrics=len(step.schema) if isinstance(step, InstrumentedStep) else 0,
                 median=float(np.median(ratios[name])), minimum=min(ratios[name]),
                 quartiles=(float(np.percentile(ratios[name], 25)), float(np.percentile(ratios[name], 75))),
                 pairs=len(ratios[name]), compile_seconds=compile_seconds[name]) for name, step in steps.items()]
    return float(np.median(times)), rows


def _made(make: Callable[[], tuple[nn.Cell, nn.Cell]], arguments: dict[str, Any] | None,
          batch: Sequence[Any]) -> tuple[nn.Cell, float]:
    """A step that has been compiled and has run, and the seconds of its first calls."""
    network, optimizer = make()
    step = nn.TrainOneStepCell(network, optimizer) if arguments is None else InstrumentedStep(network, optimizer, **arguments)
    step.set_train()
    first = seconds_of(step, batch)
    if (arguments or {}).get("every", 1) > 1:
        first += seconds_of(step, batch)  # two graphs
    calls = _calls(arguments)
    while isinstance(step, InstrumentedStep) and int(step.step_count.asnumpy()) % calls:  # each k calls have one measured step
        seconds_of(step, batch)
    seconds_of(step, batch, calls)
    return step, first


def _calls(arguments: dict[str, Any] | None) -> int:
    """How many calls make a pair."""
    every = (arguments or {}).get("every", 1)
    return every if every <= 100 else 1


def machine() -> str:
    """Processor, cores, memory, release and device, in a line."""
    mode = "graph" if _compat.is_graph_mode() else "PyNative"
    return f"{hardware()}; MindSpore {ms.__version__}, {_compat.device_target()}, {mode} mode"


def show(second: float, rows: Sequence[Cost], console: Console | None = None) -> None:
    """Print a table of costs."""
    table = Table(box=None, pad_edge=False, title=f"a plain step: {1000 * second:.4g} ms", title_justify="left",
                  title_style="")
    for column in ("", "cost", "middle half", "least", "pairs", "metrics", "bytes a record", "first call, s"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        low, high = row.quartiles
        table.add_row(row.name, f"{row.median - 1:+.1%}", f"{low - 1:+.1%} to {high - 1:+.1%}", f"{row.minimum - 1:+.1%}",
                      f"{row.pairs}", f"{row.metrics}", f"{4 * row.metrics:,}", f"{row.compile_seconds:.1f}")
    (console or wide_console()).print(table)


def wide_console() -> Console:
    """A console whose tables are not folded where it is no terminal, as in a log."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=150)


def main(seconds: float = 60.0, mode: str = "graph", device: str | None = None, size: str = "5M") -> None:
    """Compare steps of a GPT, and print machine, table and one line of JSON."""
    target = {"device_target": device} if device else {}
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE, **target)
    console = wide_console()
    console.print(machine())
    network, batch = SIZES[size]

    def make() -> tuple[nn.Cell, nn.Cell]:
        net = GPT(**network)
        return net, nn.Adam(net.trainable_params(), 1e-4)

    with console.status("compiling the plain step") as status:
        second, rows = costs(make, gpt_batch(network["vocabulary"], network["length"], batch), seconds=seconds, least=4,
                             tell=status.update)
    console.print(f"A GPT with {sum(parameter.size for parameter in make()[0].trainable_params()):,} weights, "
                  f"{batch * network['length']:,} tokens a step, Adam.")
    show(second, rows, console)
    noise = max(abs(edge - 1) for row in rows if OPTIONS[row.name] is None for edge in row.quartiles)
    console.print(f"The plain step differs from itself by up to {noise:.1%} in the middle half of its pairs: what costs less "
                  "than that cannot be told from nothing here. The smaller a step, the more of it a cost is.")
    print(json.dumps({"machine": machine(), "versions": versions(), "size": size, "seconds": second,
                      "costs": [asdict(row) for row in rows]}))
