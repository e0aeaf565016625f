"""How ways to look at gradients are compared: what a `Way` is, ours, the plain step, and the table.

Each way trains a GPT of 5 M parameters of its own from the same weights on the same batch, so that all of them make the same
steps and the true numbers are known.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from benchmarks.networks import GPT
from benchmarks.timing import seconds
from instrument import InstrumentedStep


@dataclass
class Way:
    """One way to look: `step()` trains and looks; it returns the gradient norm that it saw, if it did."""

    name: str
    step: Callable[[], float | None]
    copied: int
    sees: str
    is_uneven: bool = False  # some steps cost more than others, so that the mean says what a run pays
    first: int = 2  # number of the first step that is timed; before it, what is compiled
    seen: list[float | None] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def look(self) -> None:
        self.seen.append(self.step())


def fresh(**arguments: Any) -> tuple[nn.Cell, nn.Cell]:
    """A network and a step of it, plain unless told otherwise."""
    ms.set_seed(1)
    network = GPT(**arguments)
    return network, nn.Adam(network.trainable_params(), 1e-4)


def norm(arrays: Any) -> float:
    """In float32, as people write it."""
    return float(np.sqrt(sum(np.sum(np.square(array)) for array in arrays)))


def plain(batch: tuple) -> Callable[[], None]:
    """A step of `nn.TrainOneStepCell`, with nothing looked at but the loss."""
    step = nn.TrainOneStepCell(*fresh()).set_train()
    return lambda: step(*batch).asnumpy() and None


def ours(batch: tuple, name: str, *, every: int = 1, kind: type | None = None, **options: Any) -> Way:
    network, optimizer = fresh()
    if kind:
        optimizer = kind(network.trainable_params(), 1e-4)
    step = InstrumentedStep(network, optimizer, every=every, **options).set_train()
    last = [0.0]

    def run() -> float | None:
        loss, stats = step(*batch)
        loss.asnumpy()
        values = step.schema.unpack(stats)
        is_new, last[0] = values["step"] != last[0], values["step"]
        return values["grad/norm"] if is_new else None

    sees = "norms of gradients and weights" + ("" if options.get("activations", "") is None else ", activations")
    run()
    if every > 1:
        run()  # two graphs
    return Way(name, run, 4 * len(step.schema), sees, is_uneven=every > 1, first=3 if every > 1 else 2)


def bytes_of(parameters: Any) -> int:
    return sum(parameter.size * parameter.itemsize for parameter in parameters)


def compare(base: Callable[[], Any], ways: list[Way], pairs: int) -> float:
    """Fill in the ratios; returns the median seconds of a plain step."""
    times = []
    for i in range(pairs):
        for way in ways:
            first, second = (seconds(each) for each in ((way.look, base) if i % 2 else (base, way.look)))
            looking, plain_one = (first, second) if i % 2 else (second, first)
            times.append(plain_one)
            way.ratios.append(looking / plain_one)
    return float(np.median(times))


def show(ways: list[Way], true: list[float]) -> Iterator[dict[str, Any]]:
    """Print a table, with the last gradient norm that each saw against the true one of that step."""
    print(f"{'way':38}{'ratio':>8}{'least':>8}{'copied, bytes':>15}  {'gradient norm, error':>22}  sees")
    for way in ways:
        numbered = [(number, value) for number, value in enumerate(way.seen, way.first) if value is not None]
        error = None
        if numbered and true:
            number, value = numbered[-1]
            error = abs(value - true[number - 1]) / true[number - 1]
        median = float((np.mean if way.is_uneven else np.median)(way.ratios))
        said = "none" if error is None else f"{error:.1e}"
        print(f"{way.name:38}{median:8.3f}{min(way.ratios):8.3f}{way.copied:15,}  {said:>22}  {way.sees}", flush=True)
        yield {"way": way.name, "ratio": median, "minimum": min(way.ratios), "pairs": len(way.ratios), "copied": way.copied,
               "error": error, "sees": way.sees}


def true_norms(batch: tuple, steps: int) -> list[float]:
    """In float64, of the gradients that each of these steps trained with."""
    network, optimizer = fresh()
    step = nn.TrainOneStepCell(network, optimizer, return_grad=True).set_train()
    norms = []
    for _ in range(steps):
        _, gradients = step(*batch)
        norms.append(float(np.sqrt(sum(np.sum(np.square(gradient.asnumpy().astype(np.float64)))
                                       for gradient in gradients.values()))))
    return norms
