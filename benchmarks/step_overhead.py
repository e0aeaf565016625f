"""What each option costs, as the paired ratio of a step's time to that of `nn.TrainOneStepCell`.

    python benchmarks/step_overhead.py [pairs]

All steps live in one process and run in turn, so that a noisy machine slows them alike; each ratio is of two steps that
ran one after the other. Compile time (first call) and peak memory are measured apart, each in a process of its own.
"""
from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
import numpy as np
from mindspore import nn

from benchmarks.networks import GPT, gpt_batch
from benchmarks.timing import machine
from instrument import InstrumentedStep

LEAVES = 31
VARIANTS = {
    "plain again": None,
    "norms": {"activations": None},
    "norms, totals only": {"activations": None, "per_parameter": False},
    "norms + blocks": {},
    f"norms + {LEAVES} leaves": {"activations": "leaves"},
    "norms + leaves + activation gradients": {"activations": "leaves", "activation_gradients": True},
}


def make_step(options: dict | None) -> nn.Cell:
    """A step on a network of its own."""
    ms.set_seed(1)
    network = GPT()
    optimizer = nn.Adam(network.trainable_params(), 1e-4)
    if options is None:
        step = nn.TrainOneStepCell(network, optimizer)
    else:
        options = dict(options)
        if options.get("activations") == "leaves":
            leaves = [name for name, cell in network.cells_and_names()
                      if name and not list(cell.cells()) and not isinstance(cell, nn.CrossEntropyLoss)][:LEAVES]
            options["activations"] = lambda name, cell: name in leaves
        step = InstrumentedStep(network, optimizer, **options)
    return step.set_train()


def run(step: nn.Cell, batch: tuple) -> np.ndarray:
    """Seconds of one step, until its result is on the host: of the clock, and of the processors."""
    start = np.array([time.perf_counter(), time.process_time()])
    result = step(*batch)
    (result[1] if isinstance(result, tuple) else result).asnumpy()
    return np.array([time.perf_counter(), time.process_time()]) - start


def first_call(name: str) -> dict:
    """Processor time of the compile and peak memory of one variant, in a fresh process."""
    code = ("import json, sys; sys.path.insert(0, '.'); import benchmarks.step_overhead as b; "
            "b.ms.set_context(mode=b.ms.GRAPH_MODE, device_target='CPU'); "
            f"s = b.make_step({'None' if name == 'plain' else f'b.VARIANTS[{name!r}]'}); d = b.gpt_batch(); "
            "t = b.run(s, d)[1]; u = min(b.run(s, d)[1] for _ in range(3)); "
            "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')); "
            "print(json.dumps([t - u, int(peak.split()[1]) / 1024]))")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    output = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    compile_s, memory = json.loads(output.strip().splitlines()[-1])
    return {"compile_s": compile_s, "peak_mb": memory}


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    print(f"{machine()}; GPT 5 M, 1,024 tokens a step, Adam")
    batch = gpt_batch()
    plain = make_step(None)
    steps = {name: make_step(options) for name, options in VARIANTS.items()}
    for step in (plain, *steps.values()):
        for _ in range(2):
            run(step, batch)
    ratios: dict[str, list[np.ndarray]] = {name: [] for name in steps}
    times = []
    for i in range(pairs):
        for name, step in steps.items():
            first = i % 2 == 0
            a = run(plain, batch) if first else run(step, batch)
            b = run(step, batch) if first else run(plain, batch)
            ratios[name].append(b / a if first else a / b)
            times.append(float((a if first else b)[0]))
    alone = {name: first_call(name) for name in ("plain", *list(VARIANTS)[1:])} if "--quick" not in sys.argv else {}
    result = {"mindspore": ms.__version__, "python": platform.python_version(), "numpy": np.__version__, "pairs": pairs,
              "plain_ms": 1000 * statistics.median(times), "parameters": sum(p.size for p in plain.weights), "variants": {}}
    print(f"plain step: median {result['plain_ms']:.0f} ms, {result['parameters']:,} parameters")
    print(f"{'variant':40} {'metrics':>8} {'median':>8} {'minimum':>8} {'cpu':>8} {'compile':>8} {'memory':>8}")
    for name, step in steps.items():
        row = {"metrics": len(step.schema) if hasattr(step, "schema") else 0,
               "median": statistics.median(ratio[0] for ratio in ratios[name]), "minimum": min(r[0] for r in ratios[name]),
               "cpu_median": statistics.median(ratio[1] for ratio in ratios[name])}
        if name in alone:
            row["compile_ratio"] = alone[name]["compile_s"] / alone["plain"]["compile_s"]
            row["memory_ratio"] = alone[name]["peak_mb"] / alone["plain"]["peak_mb"]
        result["variants"][name] = {key: float(value) for key, value in row.items()}
        print(f"{name:40} {row['metrics']:8} {row['median']:8.4f} {row['minimum']:8.4f} {row['cpu_median']:8.4f} "
              f"{row.get('compile_ratio', float('nan')):8.3f} {row.get('memory_ratio', float('nan')):8.3f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
