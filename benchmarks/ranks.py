"""What joining over ranks costs: steps of data parallel processes on one machine, as paired ratios to `nn.TrainOneStepCell`.

    msrun --worker_num=2 --local_worker_num=2 --join=True --log_dir=/tmp/ranks benchmarks/ranks.py [pairs]
    cat /tmp/ranks/worker_0.log

All processes make the same calls in the same order, since each step has collectives; rank 0 prints. The plain step reduces its
gradients too. On a CPU the processes share its cores, and their collectives go through sockets: the ratio says what is added.
"""
from __future__ import annotations

import os
import sys
from dataclasses import asdict

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
from mindspore import communication, nn

from benchmarks.networks import NETWORKS
from benchmarks.timing import print_machine, print_result
from instrument.bench import costs, show

OPTIONS = {
    "the plain step again": None,
    'the default, scope="local"': {"scope": "local"},
    'the default, scope="global"': {},
    "the default, ranks=True": {"ranks": True},
}


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    communication.init()
    ranks = communication.get_group_size()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=ranks)
    make, batch = NETWORKS["GPT 5M"]()

    def made() -> tuple[nn.Cell, nn.Cell]:
        ms.set_seed(1)
        net = make()
        return net, nn.Adam(net.trainable_params(), 1e-4)

    second, rows = costs(made, batch, options=OPTIONS, seconds=0, least=pairs)
    if communication.get_rank() == 0:
        print_machine(f"GPT 5M, {ranks} processes")
        show(second, rows)
        print_result({"ranks": ranks, "seconds": second, "costs": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
