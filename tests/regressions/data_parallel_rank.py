"""One rank of test_data_parallel: trains on its part of each batch, and tells what the steps say.

    python data_parallel_rank.py graph|pynative [local|joined|summed|stock|scaled] ...
"""
import os
import sys
import time
import urllib.request

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.train.callback import RunContext

from instrument import AttentionProbe, Histogram, InstrumentedStep, TrainingMonitor
from instrument.taps import ALL_STATS
from instrument.upgrade import StepOptions, upgrade
from instrument.writers import PrometheusWriter
from networks import MLP, mlp_batches
from ranks import tell

STEPS = 4
CEILING = 4.5  # below the norm of the joined batch's gradients in the first two steps, and above it in the third


class Probed(MLP):
    """With what it puts out taken for attention scores."""

    def __init__(self):
        super().__init__()
        self.probe = AttentionProbe()
        self.dropout = nn.Dropout(p=0.0)  # changes nothing, and the step takes the network for a random one

    def construct(self, x, y):
        error = self.dropout(self.probe(self.second(self.act(self.first(x))))) - y
        return {"loss": (error * error).mean(), "part": error.sum()}


def mine(array):
    """This rank's part of a joined batch."""
    length = len(array) // get_group_size()
    return Tensor(array[length * get_rank():length * (get_rank() + 1)])


def show(name, step, outputs):
    loss, stats = outputs
    histograms = {key: counts.tolist() for key, counts in step.schema.histograms(stats).items()}
    scopes = {metric.name: (metric.scope, metric.merge) for metric in step.schema}
    tell(name, [float(loss), step.schema.unpack(stats), histograms, scopes])


def local_run():
    """Numbers of this rank's own, recorded; the spike score and the spread are of all. Rank 1 waits for its data."""
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=get_group_size())
    network = MLP()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.5), max_grad_norm=0.5, activations="leaves",
                            updates=True, window=4, spike_window=2, skip_spikes=1e9, scope="local", ranks=True)
    params = {"train_network": step, "cur_step_num": 0, "mode": "train"}
    context = RunContext(params)
    # Each rank of a machine wants the same port, as two jobs would.
    exporter = PrometheusWriter(port=20000 + int(os.environ["MS_SCHED_PORT"]) % 10000, labels={"rank": str(get_rank())})
    exporter.every_rank = True
    with TrainingMonitor("run", alarms=[], writers=[exporter]) as monitor:
        monitor.on_train_begin(context)
        for number, (x, y) in enumerate(mlp_batches(STEPS), 1):
            time.sleep(0.2 * get_rank())
            monitor.on_train_step_begin(context)
            outputs = step(mine(x), mine(y))
            show("local", step, outputs)
            params.update(cur_step_num=number, net_outputs=outputs)
            monitor.on_train_step_end(context)
        while exporter.port is None:  # it opens with the first record, in a thread of its own
            time.sleep(0.05)
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics") as answer:
            served = answer.read().decode()
        tell("served", [exporter.port, [line for line in served.splitlines() if line.startswith("instrument_loss{")],
                        "instrument_grad_norm{" in served])
        monitor.on_train_end(context)
        tell("errors", dict(monitor.errors))


def joined_run():
    """Numbers of all ranks, which clip; in the last step, one of them has NaN in its batch."""
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=get_group_size())
    network = Probed()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.5), activations="leaves", loss_scale=8.0,
                            max_grad_norm=CEILING, activation_stats=ALL_STATS, activation_gradients=True, spike_window=2,
                            ranks=True,
                            histograms=[Histogram("activation", "act", every=2), Histogram("gradient", "second.weight")])
    step.set_train()
    for number, (x, y) in enumerate(mlp_batches(STEPS), 1):
        if number == STEPS and get_rank() == 1:
            y = np.full_like(y, np.nan)
        if number == 2 and get_rank() != 1:  # of which no time is known
            step.tell_times(3.0 - get_rank(), float("nan"))
        show("joined", step, step(mine(x), mine(y)))
    tell("weights", [parameter.asnumpy().tolist() for parameter in network.trainable_params()])


def summed_run():
    """Gradients are added; two calls make a step, and the graph decides which steps it measures."""
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=False, device_num=get_group_size())
    network = Probed()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=[r"^act$"], every=3, accumulate=2,
                            activation_gradients=True, ranks=True, updates=True)
    step.set_train()
    for x, y in mlp_batches(8):
        show("summed", step, step(mine(x), mine(y)))


def stock_run(scaled):
    """MindSpore's own step, made to measure what all ranks do."""
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=get_group_size())
    network = MLP()
    optimizer = nn.SGD(network.trainable_params(), 0.5)
    kind = nn.TrainOneStepWithLossScaleCell if scaled else nn.TrainOneStepCell
    step = kind(network, optimizer, **({"scale_sense": Tensor(8.0, ms.float32)} if scaled else {}))
    upgrade(step, StepOptions(activations="leaves", activation_stats=ALL_STATS, activation_gradients=True, scope="global",
                              ranks=True, spike_window=2, every=2 if scaled else 1,
                              histograms=[Histogram("activation", "act", every=2)]))
    step.set_train()
    for x, y in mlp_batches(STEPS):
        step.tell_times(1.0 + get_rank(), 0.5)
        loss = step(mine(x), mine(y))
        show("scaled" if scaled else "stock", step, (loss[0] if scaled else loss, step.snapshot()))


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE, device_target="CPU")
    init()
    for run in sys.argv[2:]:
        {"local": local_run, "joined": joined_run, "summed": summed_run,
         "stock": lambda: stock_run(False), "scaled": lambda: stock_run(True)}[run]()
