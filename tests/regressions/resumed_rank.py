"""One rank of test_resumed_ranks: trains in two calls, the second of which resumes, with monitors that are not alike.

    python resumed_rank.py first|second
"""
import sys

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.train.callback import RunContext

from instrument import InstrumentedStep, TrainingMonitor
from instrument.alarms import NOT_JUDGED, Alarm, Finding
from instrument.samples import TextSampler
from networks import MLP, mlp_batches
from ranks import tell

CALLS = 30
STOPS_AT = 9


class Late(Alarm):
    """Stops training."""

    def check(self, record):
        if "grad/norm" not in record.values:
            return NOT_JUDGED
        return Finding("late", "grad/norm", record.values["grad/norm"]) if record.step >= STOPS_AT else None


def main():
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=get_group_size())
    network = MLP()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.01), every=3)
    samples = [TextSampler(str.upper, ["a"], 2)] if get_rank() == 0 else []
    params = {"train_network": step, "cur_step_num": 0, "mode": "train"}
    context = RunContext(params)
    made = []
    with TrainingMonitor("run", alarms=[Late(policy="stop")], text_samples=samples, resume=True) as monitor:
        monitor.on_train_begin(context)
        batches = mlp_batches(4 if sys.argv[1] == "first" else CALLS, seed=get_rank())
        for number, batch in enumerate(batches, 1):
            monitor.on_train_step_begin(context)
            outputs = step(*map(Tensor, batch))
            made.append(step.schema.unpack(outputs[1])["step"])
            params.update(cur_step_num=number, net_outputs=outputs)
            monitor.on_train_step_end(context)
            if number % 4 == 0 and get_rank() == 0:  # alone
                evaluated = RunContext({"mode": "eval", "eval_results": {"accuracy": number / 100}})
                monitor.on_eval_begin(evaluated)
                monitor.on_eval_end(evaluated)
            if context.get_stop_requested():
                break
        monitor.on_train_end(context)
        tell("made", made)
        tell("errors", dict(monitor.errors))


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    init()
    main()
