"""MindStudio Probe's training monitor for MindSpore (`pip install mindstudio-probe`), as `alternatives.py` measures it.

    python benchmarks/probe.py    # what stops it on this device as it is installed, and what it says of NaN

It writes a table of each step, and works in PyNative mode. On a CPU, as it is installed, it does not get as far as a gradient
norm; `errors` shows where it stops. To be measured all the same it is helped, in ways that its users could take: an optimizer
that MindSpore does not compile, a `grad` of None at each parameter, and `mint.norm`, which has no kernel on a CPU, out of its
sight, so that it takes `ops.norm`, as it does on releases without `mint.norm`.
"""
from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("MSPROBE_LOG_LEVEL", "3")  # errors alone
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn
from mindspore.experimental import optim

from benchmarks.timing import print_machine, print_result
from instrument import InstrumentedStep

OPS = ("norm", "min", "max", "mean", "nans")


def is_installed() -> bool:
    return importlib.util.find_spec("msprobe") is not None


class Given(nn.Cell):
    """The gradient of its weight is what it is called with."""

    def __init__(self, elements: int = 64):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones(elements, np.float32)), name="weight")

    def construct(self, x):
        return (self.weight * x).sum()


@contextlib.contextmanager
def without_mint_norm() -> Iterator[None]:
    """It looks for `mint.norm`, and where there is none it takes `ops.norm`."""
    norm = mint.norm
    del mint.norm
    try:
        yield
    finally:
        mint.norm = norm


class Watched:
    """A network and an optimizer of its own that the monitor watches; `step` trains, as a loop of one's own does."""

    def __init__(self, network: nn.Cell, directory: str, *, base: type = optim.Adam, has_grad: bool = True, **config: Any):
        from msprobe.mindspore import TrainerMon

        # The monitor replaces `construct` of the optimizer's class, for all optimizers of that class in the process.
        kind = type(base.__name__, (base,), {})
        self.parameters = network.trainable_params()
        self.optimizer = kind(self.parameters, 1e-4)
        if has_grad:
            for parameter in self.parameters:
                parameter.grad = None
        path = Path(directory, "config.json")
        path.write_text(json.dumps({"targets": {}, "format": "csv", "ndigits": 16, **config}), "utf-8")
        os.environ["MONITOR_OUTPUT_DIR"] = directory
        self.monitor = TrainerMon(str(path), params_have_main_grad=False)
        self.monitor.set_monitor(network, self.optimizer)
        self.gradients_of = ms.value_and_grad(network, None, self.parameters)
        self.gradients: tuple = ()

    def step(self, *batch: Tensor) -> Tensor:
        loss, self.gradients = self.gradients_of(*batch)
        self.optimizer(self.gradients)
        return loss

    def rows(self, table: str) -> list[dict[str, str]]:
        """Of the last step that it wrote."""
        paths = Path(self.monitor.tensorboard_dir).glob(f"{table}_*-*.csv")
        with open(max(paths, key=lambda path: int(path.stem.rsplit("-", 1)[1])), encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def errors(self) -> tuple[float, float]:
        """Relative error, in the last step, of the norm of all gradients, and the largest of one parameter's, by float64."""
        said = {f"{row['vpp_stage']}:{row['name']}": float(row["norm"]) for row in self.rows("grad_unreduced")}
        pairs = [(said[self.monitor.param2name[parameter]], float(np.linalg.norm(gradient.asnumpy().astype(np.float64))))
                 for parameter, gradient in zip(self.parameters, self.gradients)]
        whole, true = (float(np.linalg.norm(values)) for values in zip(*pairs))
        return abs(whole - true) / true, max(abs(one - right) / right for one, right in pairs if right)


def plain(network: nn.Cell) -> Callable[..., Tensor]:
    """The same loop with nothing looked at."""
    parameters = network.trainable_params()
    optimizer = optim.Adam(parameters, 1e-4)
    gradients_of = ms.value_and_grad(network, None, parameters)

    def step(*batch: Tensor) -> Tensor:
        loss, gradients = gradients_of(*batch)
        optimizer(gradients)
        return loss

    return step


def errors() -> list[tuple[str, str]]:
    """What is tried, each on a network of its own, and the first line of the error that it ends with ("" for none)."""
    tried: list[tuple[str, dict[str, Any]]] = [
        ("norms of gradients", {"wg_distribution": True, "ops": ["norm"]}),
        ("gradients, without norms", {"wg_distribution": True, "ops": ["max"], "has_grad": False}),
        ("activations, nn.Adam", {"xy_distribution": True, "ops": ["max"], "base": nn.Adam}),
        ("activations, without norms", {"xy_distribution": True, "ops": ["max"]})]
    found = []
    for name, options in tried:
        with tempfile.TemporaryDirectory() as directory:
            try:
                Watched(Given().set_train(), directory, **options).step(Tensor(np.ones(64, np.float32))).asnumpy()
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                line = re.sub(r"::\d+", "", str(error).strip().splitlines()[0])  # an address
                found.append((name, f"{type(error).__name__}: {line}"))
            else:
                found.append((name, ""))
    return found


def wrong_columns() -> list[str]:
    """Norms of activation gradients that are below 0, with `norm` last: the warning is logged, and columns have moved."""
    network = nn.SequentialCell(nn.Dense(4, 6), nn.ReLU(), nn.Dense(6, 2))
    network = nn.WithLossCell(network, nn.CrossEntropyLoss()).set_train()
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    with tempfile.TemporaryDirectory() as directory:
        watched = Watched(network, directory, xy_distribution=True, ops=["min", "max", "mean", "norm"])
        watched.step(Tensor(x), Tensor(np.arange(8).astype(np.int32) % 2)).asnumpy()
        return [f"{row['name']} {row['norm']}" for row in watched.rows("actv_grad") if float(row["norm"] or 0) < 0]


def with_nan() -> dict[str, dict[str, str]]:
    """What is said of a gradient of 64 elements that has 3 NaN and an infinity: by the monitor, by ours, and what is true.

    As texts, since JSON has no NaN.
    """
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)
    x[[7, 30, 63]], x[40] = np.nan, np.inf
    with tempfile.TemporaryDirectory() as directory, without_mint_norm():
        watched = Watched(Given().set_train(), directory, wg_distribution=True, ops=list(OPS))
        watched.step(Tensor(x)).asnumpy()
        row = watched.rows("grad_unreduced")[0]
    network = Given()
    step = InstrumentedStep(network, nn.Adam(network.trainable_params(), 1e-4), activations=None, counts=True).set_train()
    values = step.schema.unpack(step(Tensor(x))[1])
    said = {"probe": {name: float(row[name]) for name in OPS},
            "ours": {name: values[name] for name in values if name.startswith("grad/")},
            "true": {"norm": np.linalg.norm(x.astype(np.float64)), "min": np.min(x), "max": np.max(x), "mean": np.mean(x),
                     "nans": np.isnan(x).sum(), "nonfinite": (~np.isfinite(x)).sum()}}
    return {who: {name: str(value) for name, value in numbers.items()} for who, numbers in said.items()}


def main() -> None:
    if not is_installed():
        sys.exit("MindStudio Probe is not installed: pip install mindstudio-probe")
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    print_machine()
    found, columns = dict(errors()), wrong_columns()
    for name, error in found.items():
        print(f"{name}: {error or 'runs'}")
    print("norms below 0:", columns)
    print_result({"errors": found, "wrong_columns": columns, "with_nan": with_nan()}, "mindstudio-probe")


if __name__ == "__main__":
    main()
