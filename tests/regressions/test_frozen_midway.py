"""A parameter frozen after the optimizer was made: what each mode makes of it is said; PyNative's zeros are no gradient."""
import numpy as np
import pytest
from mindspore import Tensor, nn

from instrument import Histogram, InstrumentedStep
from instrument.schema import Schema
from networks import MLP, mlp_batches

OF_GRADIENT = {"grad/norm/first.weight", "grad/nonfinite/first.weight", "moment1/cosine/first.weight"}


def make(network):
    return InstrumentedStep(network, nn.Momentum(network.trainable_params(), 0.1, 0.9), activations=None, counts=True,
                            moments=True, histograms=[Histogram("gradient", "first.weight", every=1)])


def test_frozen_midway(mode):
    network = MLP()
    step = make(network)
    weight = network.first.weight
    moved = []
    for number, batch in enumerate(mlp_batches(3)):
        weight.requires_grad = number < 2
        before = weight.asnumpy().copy()
        stats = step(*map(Tensor, batch))[1]
        values, histograms = step.schema.unpack(stats), step.schema.histograms(stats)
        moved.append(bool((weight.asnumpy() != before).any()))
        # A compiled graph goes on as it was compiled: there the parameter has a gradient still, and is trained by it.
        has_gradient = number < 2 or mode == "graph"
        assert OF_GRADIENT & set(values) == (OF_GRADIENT if has_gradient else set())
        assert ("histogram/gradient/first.weight" in histograms) == has_gradient
        assert "weight/norm/first.weight" in values and values["grad/norm/first.bias"] > 0
        if has_gradient:
            assert values["grad/norm/first.weight"] > 0
    assert moved == [True] * 3  # by momentum in PyNative mode, which is what the warning says


@pytest.mark.parametrize("number", [1, 8])
def test_an_optimizer_with_frozen_parameters_is_told_of(told, number):
    network = MLP()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    names = [parameter.name for parameter in network.trainable_params()][:number]
    for parameter in list(network.trainable_params())[:number]:
        parameter.requires_grad = False
    InstrumentedStep(network, optimizer, activations=None)
    [message] = told
    told.clear()
    assert "do not require a gradient: first.weight" in message and "Freeze first" in message
    assert ("more" in message) == (len(names) > 5)


def test_a_schema_without_a_step_leaves_nothing_out():
    schema = Schema(make(MLP()).schema.metrics)
    assert len(schema.unpack(np.zeros(len(schema)))) == len(schema)
