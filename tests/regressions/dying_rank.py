"""One rank of test_dying_rank: trains until rank 1 is no more.

    python dying_rank.py killed|stuck
"""
import os
import pathlib
import signal
import sys
import time

import mindspore as ms
import psutil
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Callback, Model

from instrument import InstrumentedStep, TrainingMonitor
from networks import MLP, mlp_batches
from ranks import tell

LAST = 4  # step after which rank 1 does nothing any more
PID = pathlib.Path("pid_of_rank_0")


def is_running(pid):
    """Whether the process runs; one that has ended may wait for msrun to ask for its status."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class End(Callback):
    """The end of rank 1, before its step LAST + 1."""

    def on_train_step_begin(self, run_context):
        if get_rank() != 1 or run_context.original_args().cur_step_num <= LAST:
            return
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        other = int(PID.read_text())
        time.sleep(2)  # by now rank 0 waits in an AllReduce
        assert is_running(other)
        os.kill(other, signal.SIGTERM)
        began = time.perf_counter()
        while is_running(other) and time.perf_counter() - began < 30:
            time.sleep(0.02)
        tell("seconds", time.perf_counter() - began)
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    if get_rank() == 0:
        PID.write_text(str(os.getpid()))
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=get_group_size())
    network = MLP()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.01), ranks=True)
    arrays = [list(each) for each in zip(*mlp_batches(20))]
    dataset = NumpySlicesDataset((arrays[0], arrays[1]), shuffle=False)
    Model(step).train(1, dataset, callbacks=[TrainingMonitor("run"), End()], dataset_sink_mode=False)
    tell("finished", True)


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    init()
    main()
