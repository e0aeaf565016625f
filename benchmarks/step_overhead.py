"""What each option costs, as the paired ratio of a step's time to that of `nn.TrainOneStepCell`.

    python benchmarks/step_overhead.py [--network "GPT 5M"] [--mode graph] [--seconds 120] [--options NAME ...] [--memory]

All steps live in one process and run in turn, so that a noisy machine slows them alike; each ratio is of two that ran one
after the other (`instrument.bench.costs`). "off" is a step that is not measured; with `every=k` a run pays
(measured + (k - 1) off) / k, which the last lines compute. With --memory each variant is compiled once more in a process of
its own, for the processor time of the compile and the peak memory.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
from mindspore import nn

from benchmarks.networks import NETWORKS
from benchmarks.timing import print_machine, print_result
from instrument import Histogram
from instrument.bench import costs, show

ROOT = sys.path[0]
NEVER = 10 ** 6
LEAVES = 31
ALONE = {"activations": None, "attention": False}
DEFAULT = {"attention": False}  # the GPT has probes, which only its own row and "everything" measure
EVERYTHING = {"activations": "leaves", "activation_gradients": True, "updates": True, "moments": True, "window": 16,
              "spike_window": 100}
OPTIONS: dict[str, dict[str, Any] | None] = {
    "the plain step again": None,
    "norms": ALONE,
    "norms, totals only": {**ALONE, "per_parameter": False},
    "norms + blocks: the default": DEFAULT,
    f"norms + {LEAVES} leaves": {**DEFAULT, "activations": "leaves"},
    "norms + blocks and their gradients": {**DEFAULT, "activation_gradients": True},
    "norms + attention": {"activations": None},
    "norms + updates": {**ALONE, "updates": True},
    "norms + moments": {**ALONE, "moments": True},
    "norms + window=16": {**ALONE, "window": 16},
    "norms + spike_window=100": {**ALONE, "spike_window": 100},
    "norms + counts": {**ALONE, "counts": True},
    "norms + histograms of weights, every=10": {**ALONE, "histograms": [Histogram("weight", "weight$", every=10)]},
    "everything": EVERYTHING,
    "the default, off": {**DEFAULT, "every": NEVER},
    "everything, off": {**EVERYTHING, "every": NEVER},
}


def maker(network: str):
    """`make` for `costs`, and the batch."""
    make, batch = NETWORKS[network]()

    def made() -> tuple[nn.Cell, nn.Cell]:
        ms.set_seed(1)
        net = make()
        return net, nn.Adam(net.trainable_params(), 1e-4)

    return made, batch


def with_few_leaves(options: dict[str, Any] | None, make) -> dict[str, Any] | None:
    """The same options, with the first LEAVES leaves in place of all of them."""
    if not options or options.get("activations") != "leaves":
        return options
    network, _ = make()
    leaves = [name for name, cell in network.cells_and_names()
              if name and not list(cell.cells()) and not isinstance(cell, nn.CrossEntropyLoss)][:LEAVES]
    return {**options, "activations": lambda name, cell: name in leaves}


def alone(network: str, mode: str, option: str) -> dict[str, float]:
    """Processor time of the compile and peak memory of one variant, in a fresh process."""
    code = ("import json, sys, time; sys.path.insert(0, '.'); import benchmarks.step_overhead as b; "
            "from instrument.bench import InstrumentedStep, seconds_of; "
            f"b.ms.set_context(mode={ms.GRAPH_MODE if mode == 'graph' else ms.PYNATIVE_MODE}, device_target='CPU'); "
            f"make, batch = b.maker({network!r}); options = b.with_few_leaves(b.OPTIONS[{option!r}], make); pair = make(); "
            "s = b.nn.TrainOneStepCell(*pair) if options is None else InstrumentedStep(*pair, **options); s.set_train(); "
            "t = time.process_time(); seconds_of(s, batch); first = time.process_time() - t; seconds_of(s, batch); "
            "t = time.process_time(); seconds_of(s, batch); again = time.process_time() - t; "
            "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')); "
            "print(json.dumps([first - again, int(peak.split()[1]) / 1024]))")
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    compile_s, memory = json.loads(output.strip().splitlines()[-1])
    return {"compile_s": compile_s, "peak_mb": memory}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", choices=NETWORKS, default="GPT 5M")
    parser.add_argument("--mode", choices=("graph", "pynative"), default="graph")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--options", nargs="*", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE if args.mode == "graph" else ms.PYNATIVE_MODE, device_target="CPU")
    print_machine(f"{args.network}, Adam")
    make, batch = maker(args.network)
    chosen = {name: with_few_leaves(OPTIONS[name], make) for name in args.options}
    second, rows = costs(make, batch, options=chosen, seconds=args.seconds, least=15)
    show(second, rows)
    result: dict[str, Any] = {"network": args.network, "mode": args.mode, "seconds": second,
                              "costs": [asdict(row) for row in rows]}
    median = {row.name: row.median for row in rows}
    for option in ("the default", "everything"):
        on = "norms + blocks: the default" if option == "the default" else option
        if {on, f"{option}, off"} <= set(median):
            for every in (10, 100):
                paid = (median[on] + (every - 1) * median[f"{option}, off"]) / every
                result[f"{option}, every={every}"] = paid
                print(f"{option}, every={every}: {paid - 1:+.2%}")
    if args.memory:
        result["alone"] = {name: alone(args.network, args.mode, name) for name in args.options}
        plain = result["alone"]["the plain step again"]
        for name, each in result["alone"].items():
            print(f"{name:42} compile {each['compile_s'] / plain['compile_s']:6.2f}  "
                  f"memory {each['peak_mb'] / plain['peak_mb']:6.2f}")
    print_result(result)


if __name__ == "__main__":
    main()
