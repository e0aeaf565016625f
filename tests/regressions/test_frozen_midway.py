"""A parameter frozen after the optimizer was made: what each mode makes of it is said; PyNative's zeros are no gradient."""
import mindspore as ms
import pytest
from mindspore import Tensor, nn

import instrument
from instrument import InstrumentedStep, NormStats, TrainingMonitor
from instrument.upgrade import upgrade
from networks import MLP, mlp_batches

NAME = "grad/norm/first.weight"


def sgd(network):
    return nn.Momentum(network.trainable_params(), 0.1, 0.9)


def expect(told, names):
    """One message, of these parameters."""
    [message] = told
    told.clear()
    assert "do not require a gradient" in message and f"train: {names}. In graph mode" in message and "Freeze first" in message


def test_frozen_midway_and_thawed(mode, told):
    network = MLP()
    step = InstrumentedStep(network, sgd(network), activations=None)
    weight = network.first.weight
    seen, moved = [], []
    for number, batch in enumerate(mlp_batches(5)):
        weight.requires_grad = number not in (2, 3)
        before = weight.asnumpy().copy()
        stats = step(*map(Tensor, batch))[1]
        seen.append((stats, number))
        moved.append(bool((weight.asnumpy() != before).any()))
    # Whenever a vector is read, it has what was so in its own step. A compiled graph goes on as it was compiled.
    there = [NAME in step.schema.unpack(stats) for stats, _ in seen]
    assert there == ([True] * 5 if mode == "graph" else [True, True, False, False, True])
    assert all(step.schema.unpack(stats).get(NAME, 1) > 0 for stats, _ in seen)
    assert all("weight/norm/first.weight" in step.schema.unpack(stats) for stats, _ in seen)
    assert moved == [True] * 5  # by momentum in PyNative mode, which is what the warning says
    if mode == "graph":
        assert not told  # it looks at parameters now and then
    else:
        expect(told, "first.weight")


@pytest.mark.parametrize("kind", ["step", "upgraded"])
def test_frozen_before_the_first_call(mode, kind, told):
    network = MLP()
    optimizer = sgd(network)
    step = InstrumentedStep(network, optimizer) if kind == "step" else upgrade(nn.TrainOneStepCell(network, optimizer))
    network.first.weight.requires_grad = network.first.bias.requires_grad = False
    step(*map(Tensor, mlp_batches(1)[0]))
    expect(told, "first.weight, first.bias")


def test_a_monitor_records_the_gradients_of_the_steps_that_had_them(tmp_path, told):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = MLP()
    with TrainingMonitor(tmp_path / "run", alarms=[]).loop(InstrumentedStep(network, sgd(network), window=8)) as step:
        for number, batch in enumerate(mlp_batches(8), 1):
            network.first.weight.requires_grad = number not in (4, 5, 8)
            step(*map(Tensor, batch))
    ms.set_context(mode=ms.GRAPH_MODE)
    run = instrument.read(tmp_path / "run")
    assert run[NAME].step.tolist() == [1, 2, 3, 6, 7] and len(run["grad/norm"].step) == 8
    expect(told, "first.weight")


@pytest.mark.parametrize("number", [1, 2])
def test_norms_by_themselves_tell_of_it_too(told, number):
    network = MLP()
    parameters = sgd(network).parameters
    for parameter in parameters[:number]:
        parameter.requires_grad = False
    NormStats(parameters)
    expect(told, ", ".join(parameter.name for parameter in parameters[:number]))
