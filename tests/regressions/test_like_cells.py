"""A measured cell and one of the same class that is not measured.

The compiler of 2.0.0 merges the graphs of cells whose class has one module, qualified name and arguments. A tapped cell
that passes for its own class is then merged with the next one that has no tap, and the step does not compile.
"""
import numpy as np
import pytest
from mindspore import Tensor, nn

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
