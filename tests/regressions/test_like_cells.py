"""A measured cell and one of the same class that is not measured.

The compiler of 2.0.0 merges the graphs of cells whose class has one module, qualified name and arguments. A tapped cell
that passes for its own class is then merged with the next one that has no tap, and the step does not compile.
"""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import reference
from instrument import InstrumentedStep
from networks import MLP, mlp_batches


@pytest.mark.parametrize("measured", ["first", "second"])
def test_one_of_two_cells_of_a_class_is_measured(mode, measured):
    network = MLP()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1), activations=[f"^{measured}$"])
    for batch in mlp_batches(3):
        expected = reference.MLP([p.asnumpy() for p in network.trainable_params()]).step(*batch)[2]
        values = step.schema.unpack(step(*map(Tensor, batch))[1])
        activations = {name.split("/", 2)[2] for name in values if name.startswith("activation/")}
        assert activations == {measured}
        # float32: a product of 32 terms and a mean of 256, each rounding 1.2e-7
        assert values[f"activation/rms/{measured}"] == pytest.approx(np.sqrt(np.mean(expected[measured] ** 2)), rel=3e-6)


class Two(nn.Cell):
    """Two cells that were made with equal arguments, each with a cell inside that is measured."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(0)
        weights = [Tensor(random.normal(size=(4, 4)), ms.float32) for _ in range(2)]
        self.first = nn.Dense(4, 4, activation="sigmoid")
        self.second = nn.Dense(4, 4, activation="sigmoid")
        for cell, weight in zip((self.first, self.second), weights):
            cell.weight.set_data(weight)

    def construct(self, x):
        return ops.ReduceMean()(self.second(self.first(x)))


def test_cells_that_were_made_alike_measure_each_its_own(mode):
    # The compiler of 2.0.0 had both call the activation inside one of them: counts of 0 and 2.
    network = Two()
    before = [getattr(cell, "cell_init_args", None) for _, cell in network.cells_and_names()]
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1), activations=[nn.Sigmoid])
    for i in range(3):
        x = np.random.default_rng(i).normal(size=(5, 4)).astype(np.float32)
        weights = [p.asnumpy().astype(np.float64) for p in network.trainable_params()]
        values = step.schema.unpack(step(Tensor(x))[1])
        output = x
        for name, (weight, bias) in {"first": weights[:2], "second": weights[2:]}.items():
            output = 1 / (1 + np.exp(-(output @ weight.T + bias)))
            assert values[f"activation/count/{name}.activation"] == 1
            # float32: a product of 4 terms, an exponential and a mean of 20
            assert values[f"activation/rms/{name}.activation"] == pytest.approx(np.sqrt(np.mean(output ** 2)), rel=2e-6)
    step.remove_taps()
    assert [getattr(cell, "cell_init_args", None) for _, cell in network.cells_and_names()] == before
