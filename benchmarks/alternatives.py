"""The ways in which people look at gradients today, beside ours, on one network: time, bytes copied, and what they say.

    python benchmarks/alternatives.py [pairs]                # all of them but MindFormers
    python benchmarks/alternatives.py [pairs] probe          # MindStudio Probe alone
    python benchmarks/alternatives.py [pairs] mindformers    # what MindFormers measures, against its own step

GPT of 5 M parameters, 1,024 tokens a step, Adam; each way trains a network of its own from the same weights on the same batch,
so that all of them make the same steps and the true numbers are known: the gradient norm in float64, of gradients that a step
returned. Ratios are of a step of the way, with all that it does afterwards, to a step of `nn.TrainOneStepCell` right before or
after it. "copied" is what goes from the device to the host at each step; on a CPU a copy may cost nothing, over a bus it does.
The ways that need PyNative mode come last, against a plain step in that mode. MindStudio Probe is among them where it is
installed (`pip install mindstudio-probe`), helped as probe.py says, with an optimizer that MindSpore does not compile; it and
ours beside it are against a plain loop with that optimizer. MindFormers has a step of its own: local_norm.py.
"""
from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental import optim
from mindspore.train import Callback, Model, SummaryCollector

from benchmarks import probe
from benchmarks.networks import gpt_batch
from benchmarks.timing import print_machine, print_result, seconds
from benchmarks.ways import Way, bytes_of, compare, fresh, norm, ours, plain, show, true_norms
from instrument.environment import version_of


def returned_gradients(batch: tuple) -> Way:
    """`return_grad=True`, and NumPy."""
    network, optimizer = fresh()
    step = nn.TrainOneStepCell(network, optimizer, return_grad=True).set_train()

    def run() -> float:
        _, gradients = step(*batch)
        return norm(gradient.asnumpy() for gradient in gradients.values())

    run()
    return Way("return_grad=True, norms in NumPy", run, bytes_of(network.trainable_params()), "norms of gradients")


def second_backward(batch: tuple) -> Way:
    """A backward pass of its own, after the step, as a callback would."""
    network, optimizer = fresh()
    step = nn.TrainOneStepCell(network, optimizer).set_train()
    gradients_of = ms.value_and_grad(network, None, optimizer.parameters)

    @ms.jit
    def again(*inputs):
        return gradients_of(*inputs)[1]

    def run() -> float:
        step(*batch).asnumpy()
        return norm(gradient.asnumpy() for gradient in again(*batch))

    run()
    return Way("second backward in a callback", run, bytes_of(network.trainable_params()),
               "norms of gradients, of the weights after the update")


def parameter_grad(batch: tuple) -> Way:
    """The callback that is copied most: a sum over `param.grad`."""
    network, optimizer = fresh()
    step = nn.TrainOneStepCell(network, optimizer).set_train()

    def run() -> float:
        step(*batch).asnumpy()
        return float(np.sqrt(sum(np.sum(np.square(parameter.grad.asnumpy())) for parameter in network.trainable_params()
                                 if getattr(parameter, "grad", None) is not None)))

    run()
    return Way("param.grad in a callback", run, 0, "nothing: a Parameter has no grad, in graph mode and in PyNative mode")


def host_weights(batch: tuple) -> Way:
    """Norms of the weights on the host, as a state monitor in a callback computes them."""
    network, optimizer = fresh()
    step = nn.TrainOneStepCell(network, optimizer).set_train()

    def run() -> None:
        step(*batch).asnumpy()
        for parameter in network.trainable_params():
            np.linalg.norm(parameter.asnumpy())

    run()
    return Way("weight norms in NumPy", run, bytes_of(network.trainable_params()), "norms of weights")


class Clock(Callback):
    """When each step of `Model.train` began."""

    def __init__(self):
        super().__init__()
        self.begun = []

    def on_train_step_begin(self, run_context):
        self.begun.append(time.perf_counter())

    def on_train_end(self, run_context):
        self.begun.append(time.perf_counter())


def summary_collector(batch: tuple, base: Callable[[], Any], pairs: int) -> Way:
    """MindSpore's own collector, each step, with histograms of all weights.

    It has a process of its own, which works while the next step is made; so these steps are not paired, but stand between two
    rows of plain ones, and are timed from one beginning to the next.
    """
    def plain_seconds() -> list[float]:
        return [seconds(base) for _ in range(max(pairs // 2, 1))]

    network, optimizer = fresh()
    dataset = NumpySlicesDataset(tuple(np.concatenate([tensor.asnumpy()] * (pairs + 2)) for tensor in batch), shuffle=False)
    clock, times = Clock(), plain_seconds()
    with tempfile.TemporaryDirectory() as directory:
        collector = SummaryCollector(directory, collect_freq=1, keep_default_action=False, collect_tensor_freq=1,
                                     collect_specified_data={"collect_metric": True, "histogram_regular": ".*"})
        Model(nn.TrainOneStepCell(network, optimizer)).train(1, dataset.batch(batch[0].shape[0]),
                                                             callbacks=[collector, clock], dataset_sink_mode=False)
    times += plain_seconds()
    return Way("SummaryCollector, histograms, freq 1", lambda: None, bytes_of(network.trainable_params()),
               "loss, histograms of weights", ratios=list(np.diff(clock.begun)[2:] / np.median(times)))


def hooks(batch: tuple) -> Way:
    """PyNative: a forward hook on each block."""
    network, optimizer = fresh()
    step = nn.TrainOneStepCell(network, optimizer).set_train()
    copied = [0]

    def hook(cell, inputs, output):
        array = output.asnumpy()
        copied[0] += array.nbytes
        np.sqrt(np.mean(np.square(array))), np.abs(array).max()

    for block in network.blocks:
        block.register_forward_hook(hook)

    def run() -> None:
        copied[0] = 0
        step(*batch).asnumpy()

    run()
    return Way("forward hooks on blocks, NumPy", run, copied[0],
               "activations of blocks; in graph mode hooks in a list do not run")


def probed(batch: tuple, pairs: int) -> tuple[float, list[Way], dict[str, Any]]:
    """MindStudio Probe and ours, against a plain loop: its seconds, the ways, and what the monitor's numbers are worth."""
    base_step = probe.plain(fresh()[0].set_train())

    def base() -> None:
        base_step(*batch).asnumpy()

    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second, probe.without_mint_norm():
        network, others = fresh()[0].set_train(), fresh()[0].set_train()
        gradients = probe.Watched(network, first, wg_distribution=True, ops=["norm"])
        blocks = {f"blocks.{i}": {} for i in range(len(others.blocks))}
        activations = probe.Watched(others, second, xy_distribution=True, ops=list(probe.OPS), targets=blocks)
        ways = [ours(batch, "ours, norms", kind=optim.Adam, activations=None),
                ours(batch, "ours, norms and blocks", kind=optim.Adam),
                Way("MindStudio Probe, norms", lambda: gradients.step(*batch).asnumpy() and None,
                    4 * len(network.trainable_params()), "norms of gradients"),
                Way("MindStudio Probe, blocks", lambda: activations.step(*batch).asnumpy() and None, 0,
                    "activations of blocks and their gradients, in and out: " + ", ".join(probe.OPS))]
        for run in (base, *(way.step for way in ways[2:])):
            run()
        tables = [activations.rows(name) for name in ("actv", "actv_grad")]
        ways[3].copied = 4 * len(probe.OPS) * sum(len(table) for table in tables)
        taken = compare(base, ways, pairs)
        facts = dict(zip(("norm_error", "worst_parameter"), gradients.errors()))
    return taken, ways, {**facts, "with_nan": probe.with_nan(), "wrong_columns": probe.wrong_columns(),
                         "errors_as_installed": dict(probe.errors())}


def probe_rows(batch: tuple, pairs: int) -> dict[str, Any]:
    """The rows of MindStudio Probe, or why there are none."""
    if not probe.is_installed():
        print("MindStudio Probe: not installed (pip install mindstudio-probe)")
        return {"installed": False}
    taken, ways, facts = probed(batch, pairs)
    print(f"PyNative mode, a plain loop with mindspore.experimental.optim.Adam: {1000 * taken:.0f} ms")
    rows = list(show(ways, []))
    for name, error in facts["errors_as_installed"].items():
        print(f"MindStudio Probe as installed, {name}: {error or 'runs'}")
    print(f"MindStudio Probe: gradient norm off by {facts['norm_error']:.1e}, of one parameter by up to "
          f"{facts['worst_parameter']:.1e}; norms below 0, where `norm` has no kernel: {facts['wrong_columns']}")
    return {"installed": version_of("mindstudio-probe"), "seconds": taken, "rows": rows, **facts}


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    warnings.simplefilter("ignore")
    batch = gpt_batch()
    if "probe" in sys.argv[2:]:
        ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
        print_machine()
        print_result({"mindstudio_probe": probe_rows(batch, pairs)}, "mindstudio-probe")
        return
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    print_machine()
    if "mindformers" in sys.argv[2:]:
        from benchmarks import local_norm  # imports MindFormers

        print_result({"mindformers": local_norm.rows(batch, pairs)}, "mindformers")
        return
    true = true_norms(batch, pairs + 2)
    base = plain(batch)
    base()
    ways = [ours(batch, "ours, norms", activations=None), ours(batch, "ours, norms and blocks"),
            ours(batch, "ours, norms and blocks, every=10", every=10), returned_gradients(batch), second_backward(batch),
            host_weights(batch), parameter_grad(batch)]
    second = compare(base, ways, pairs)
    ways.append(summary_collector(batch, base, pairs))
    print(f"graph mode, a plain step: {1000 * second:.0f} ms")
    rows = list(show(ways, true))

    ms.set_context(mode=ms.PYNATIVE_MODE)
    base = plain(batch)
    base()
    ways = [ours(batch, "ours, norms and blocks"), ours(batch, "ours, norms and blocks, every=10", every=10), hooks(batch)]
    second_pynative = compare(base, ways, pairs)
    print(f"PyNative mode, a plain step: {1000 * second_pynative:.0f} ms")
    rows_pynative = list(show(ways, []))
    monitor = probe_rows(batch, pairs)
    ms.set_context(mode=ms.GRAPH_MODE)
    print_result({"seconds": second, "graph": rows, "seconds_pynative": second_pynative, "pynative": rows_pynative,
                  "mindstudio_probe": monitor}, "mindstudio-probe")


if __name__ == "__main__":
    main()
