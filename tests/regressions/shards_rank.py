"""One rank of test_shards: holds shards, and tells what is measured of them.

    python shards_rank.py graph|pynative

No release compiles a sharded mode for a CPU. So the mode is only said to be one, each parameter is cut by hand once the cells
that measure are made of the whole ones, which is what MindSpore's compiler does, and gradients come cut likewise.
"""
import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.communication import get_group_size, get_rank, init

from instrument import InstrumentedStep, NormStats, _compat
from networks import MLP, mlp_batches
from ranks import tell

SHAPES = (8, 6), (4, 3, 8), (16,), (12, 4)
CASES = "spread", "gradient-inf", "weight-nan", "weights-bad", "tiny", "zero"


def values(case):
    """(weights, gradients) as they are as a whole, float32."""
    random = np.random.default_rng(7)
    scale = {"tiny": 1e-25, "zero": 0.0}.get(case, 1.0)
    weights, gradients = ([random.normal(size=shape).astype(np.float32) for shape in SHAPES] for _ in range(2))
    gradients = [(gradient * scale).astype(np.float32) for gradient in gradients]
    if case == "gradient-inf":
        gradients[1].flat[-1] = np.inf
    if case == "weight-nan":
        weights[0].flat[0] = np.nan
    if case == "weights-bad":  # on all ranks, most of the elements: they are counted all the same
        weights[0].flat[1:] = np.nan
        weights[3][:] = np.inf
    return weights, gradients


def cut(array, parts):
    """This rank's part of an array that is cut along its first axis; each part is on as many ranks."""
    return np.split(array, parts)[get_rank() % parts]


def norms():
    """Parameters on one rank, on some, on all."""
    ranks = get_group_size()
    parts = [1, ranks, 2, ranks // 2]
    for case in CASES:
        weights, gradients = values(case)
        parameters = [Parameter(Tensor(weight), name=f"p{i}") for i, weight in enumerate(weights)]
        cell = NormStats(parameters, allow_unverified=True)
        for parameter, weight, each in zip(parameters, weights, parts):
            parameter.set_data(Tensor(cut(weight, each)), slice_shape=True)
        vector = cell(tuple(Tensor(cut(gradient, each)) for gradient, each in zip(gradients, parts)))
        tell(case, [cell.schema.unpack(vector), sorted({metric.scope for metric in cell.schema})])


def step():
    """A whole step of a job in which nothing is cut but the batch."""
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=get_group_size())
    network = MLP()
    made = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.5), activations="leaves", allow_unverified=True)
    for x, y in mlp_batches(2):
        length = len(x) // get_group_size()
        mine = slice(length * get_rank(), length * (get_rank() + 1))
        _, vector = made(Tensor(x[mine]), Tensor(y[mine]))
        tell("step", [made.schema.unpack(vector), {metric.name: metric.scope for metric in made.schema}])


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE, device_target="CPU")
    init()
    _compat.sharded_by = lambda: "the parallel mode 'semi_auto_parallel'"
    norms()
    step()
