"""What steps that are not measured cost, and every option by itself and all together.

    python benchmarks/every.py [pairs]

As in step_overhead.py: paired ratios to `nn.TrainOneStepCell` of steps that run in turn in one process, GPT of 5 M parameters,
1,024 tokens. "off" is a step that is not measured, by the two ways there are: a graph of its own, or a condition in the one
graph (what a network with Dropout gets). The last column is what a run pays with every=10: the mean over ten steps, one of
them measured.
"""
from __future__ import annotations

import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
import numpy as np

from benchmarks.networks import GPT, gpt_batch
from benchmarks.timing import print_machine, print_result
from instrument import InstrumentedStep
from instrument.bench import seconds_of

NEVER = 10 ** 6
ALL = {"updates": True, "moments": True, "window": 16, "spike_window": 100, "activation_gradients": True}
# name: (arguments, whether the graph decides)
VARIANTS = {
    "norms + blocks": ({}, False),
    "updates": ({"activations": None, "updates": True}, False),
    "moments": ({"activations": None, "moments": True}, False),
    "window=16": ({"activations": None, "window": 16}, False),
    "spike_window=100": ({"activations": None, "spike_window": 100}, False),
    "all of these": (ALL, False),
    "all of these, a condition in the graph": (ALL, True),
}


def make(arguments: dict, in_graph: bool):
    from mindspore import nn

    ms.set_seed(1)
    network = GPT()
    optimizer = nn.Adam(network.trainable_params(), 1e-4)
    if arguments is None:
        return nn.TrainOneStepCell(network, optimizer).set_train()
    step = InstrumentedStep(network, optimizer, every=NEVER, **arguments).set_train()
    step.is_random = in_graph
    return step


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    chosen = sys.argv[2:] or list(VARIANTS)
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    print_machine()
    batch = gpt_batch()
    plain = make(None, False)
    started = time.process_time()
    seconds_of(plain, batch)
    plain_first = time.process_time() - started
    result = {"pairs": pairs, "plain_first_call_cpu_s": plain_first, "variants": {}}
    print(f"{'':40}{'measured':>10}{'off':>10}{'every=10':>10}{'compile':>10}   (wall; compile: CPU time of both graphs)")
    for name in chosen:
        step = make(*VARIANTS[name])
        started = time.process_time()
        for _ in range(2):
            seconds_of(step, batch)  # the first is measured, the second is not
        compiled = time.process_time() - started
        ratios = {"on": [], "off": []}
        for i in range(pairs):
            for kind in ("off", "on"):
                if kind == "on":
                    step.measure_next()
                # both orders, so that whatever drifts is on either side as often
                first, second = (plain, step) if i % 2 else (step, plain)
                a, b = seconds_of(first, batch), seconds_of(second, batch)
                ratios[kind].append(b / a if i % 2 else a / b)
        on, off = (statistics.median(ratios[kind]) for kind in ("on", "off"))
        row = {"on": on, "off": off, "every_10": (on + 9 * off) / 10, "compile": compiled / plain_first,
               "quartiles_off": np.percentile(ratios["off"], [25, 75]).tolist()}
        result["variants"][name] = row
        print(f"{name:40}{on:10.4f}{off:10.4f}{row['every_10']:10.4f}{row['compile']:10.2f}", flush=True)
        step.remove_taps()
        del step
    print_result(result)


if __name__ == "__main__":
    main()
