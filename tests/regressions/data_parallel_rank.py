"""One rank of test_data_parallel: trains on its half of each batch and prints what the step says, as JSON."""
import json
import sys

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.communication import get_rank, init

from instrument import InstrumentedStep
from networks import MLP, mlp_batches

ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE, device_target="CPU")
init()
ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=2)
network = MLP()
step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.5), max_grad_norm=0.5, activations="leaves",
                        updates=True, window=4, spike_window=2, skip_spikes=1e9)
half = slice(4 * get_rank(), 4 * get_rank() + 4)
for x, y in mlp_batches(4):
    print("RANK", get_rank(), json.dumps(step.schema.unpack(step(Tensor(x[half]), Tensor(y[half]))[1])), flush=True)
