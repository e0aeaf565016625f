"""What the parts of the norms cost inside a training step: the proof of what they cost at the least, on a CPU.

    python benchmarks/norms_in_step.py [rounds]

The plain step of the 5 M GPT, and the same with one more of the parts that a norm is made of, in turn in one process; each
timed call comes after another one of the same step. The result is the median of the ratio to the plain step beside it.
"update last" has no part of a norm: its optimizer waits for all gradients, as it has to for a norm.
"""
from __future__ import annotations

import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
from mindspore import nn, ops

from benchmarks.norms import first_element
from benchmarks.step_overhead import maker
from benchmarks.timing import print_machine, print_result
from instrument import NormStats, norms
from instrument.bench import seconds_of, seconds_warm


class UpdateLast(nn.TrainOneStepCell):
    """The stock step, whose optimizer waits for something made of all gradients."""

    def __init__(self, network, optimizer):
        super().__init__(network, optimizer)
        object.__setattr__(self, "norm_stats", NormStats(self.weights))
        sums = self.norm_stats.square_sums
        self.lengths = sums.lengths
        self.map, self.concat = ops.HyperMap(), ops.Concat()

    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, ops.fill(loss.dtype, loss.shape, self.sens))
        measured = self.measured(self.grad_reducer(grads))
        return ops.depend(loss, self.optimizer(ops.depend(grads, measured))), measured

    def measured(self, grads):
        return self.concat(self.map(first_element, grads))


class GradientRows(UpdateLast):
    """Sums of squares of the rows of gradients: `Mul`, `ReduceSum`."""

    def measured(self, grads):
        return self.concat(self.map(norms._rows, grads, self.lengths[0]))


class Rows(UpdateLast):
    """The same of gradients and weights."""

    def measured(self, grads):
        return self.concat((self.concat(self.map(norms._rows, grads, self.lengths[0])),
                            self.concat(self.map(norms._rows, self.weights, self.lengths[1]))))


class Witnesses(UpdateLast):
    """What tells an underflow from zero: `Abs`, `ReduceSum` of gradients and weights."""

    def measured(self, grads):
        return self.concat((self.concat(self.map(norms._seen_rows, grads, self.lengths[0])),
                            self.concat(self.map(norms._seen_rows, self.weights, self.lengths[1]))))


class Sums(UpdateLast):
    """Rows and witnesses, added up."""

    def measured(self, grads):
        return self.concat(self.norm_stats.square_sums(grads, self.weights))


class Norms(UpdateLast):
    """All of it."""

    def measured(self, grads):
        return self.norm_stats(grads)


STEPS = {"the plain step again": nn.TrainOneStepCell, "update last": UpdateLast, "rows of gradients": GradientRows,
         "rows of gradients and weights": Rows, "witnesses": Witnesses, "rows and witnesses, added up": Sums, "norms": Norms}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    print_machine()
    make, batch = maker("GPT 5M")
    steps = {name: step(*make()).set_train() for name, step in {"plain": nn.TrainOneStepCell, **STEPS}.items()}
    for step in steps.values():
        seconds_of(step, batch)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            taken[name].append(seconds_warm(step, batch))
    print(f"a plain step: {1000 * statistics.median(taken['plain']):.4g} ms")
    result = {}
    for name in STEPS:
        ratios = [a / b for a, b in zip(taken[name], taken["plain"])]
        result[name] = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4)
        print(f"{name:32}{result[name] - 1:+8.1%}   middle half {low - 1:+.1%} to {high - 1:+.1%}")
    print_result({"rounds": rounds, "seconds": statistics.median(taken["plain"]), "result": result})


if __name__ == "__main__":
    main()
