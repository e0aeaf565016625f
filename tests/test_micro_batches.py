"""Cells of MindSpore that cut the batch into micro-batches, outside the parallel modes: what a tap's sums mean there."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from instrument import InstrumentedStep
from networks import MLP, mlp_batches

MICRO = 4
KINDS = [name for name in ("PipelineCell", "GradAccumulationCell") if hasattr(nn, name)]


def measured(wrap, **options):
    """The values of three steps, and the weights after them."""
    ms.set_seed(1)
    network = MLP()
    weights = {parameter.name: parameter for parameter in network.trainable_params()}
    step = InstrumentedStep(wrap(network), nn.SGD(network.trainable_params(), 0.01), **options).set_train()
    values = [step.schema.unpack(step(*map(Tensor, batch))[1]) for batch in mlp_batches(3)]
    return values, {name: parameter.asnumpy().copy() for name, parameter in weights.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_of_micro_batches_add_up(kind, mode):
    whole, _ = measured(lambda network: network, activations="leaves")
    cut, _ = measured(lambda network: getattr(nn, kind)(network, MICRO), activations="leaves")
    # The first step alone: MindSpore sums the losses of micro-batches, so that the second has other weights.
    whole, cut = whole[0], cut[0]
    assert cut["loss"] == pytest.approx(MICRO * whole["loss"], rel=1e-6)  # float32
    assert cut["grad/norm"] == pytest.approx(MICRO * whole["grad/norm"], rel=1e-6)
    assert cut["weight/norm"] == whole["weight/norm"]
    cells = [name.partition("/rms/")[2] for name in whole if name.startswith("activation/rms/")]
    assert len(cells) >= 2
    for cell in cells:
        (here,) = [name.partition("/rms/")[2] for name in cut if name.startswith("activation/rms/") and name.endswith(cell)]
        assert cut[f"activation/count/{here}"] == MICRO * whole[f"activation/count/{cell}"]
        for statistic in ("mean", "rms"):
            assert cut[f"activation/{statistic}/{here}"] == pytest.approx(whole[f"activation/{statistic}/{cell}"], rel=1e-5,
                                                                          abs=1e-7)
        # The mean of the calls' maxima, which is what the README says.
        assert 0 < cut[f"activation/absmax/{here}"] <= whole[f"activation/absmax/{cell}"] * (1 + 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cells_that_cut_are_no_blocks(kind):
    network = MLP()
    step = InstrumentedStep(getattr(nn, kind)(network, MICRO), nn.SGD(network.trainable_params(), 0.01))
    assert [name for name in step.schema.names if "micro_inputs" in name] == []
    assert any(name.startswith("activation/rms/") for name in step.schema.names)


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_what_it_is_without(kind, mode):
    _, weights = measured(lambda network: getattr(nn, kind)(network, MICRO))
    ms.set_seed(1)
    network = MLP()
    plain = nn.TrainOneStepCell(getattr(nn, kind)(network, MICRO), nn.SGD(network.trainable_params(), 0.01)).set_train()
    for batch in mlp_batches(3):
        plain(*map(Tensor, batch))
    assert {parameter.name for parameter in network.trainable_params()} == set(weights)
    assert all(np.array_equal(parameter.asnumpy(), weights[parameter.name]) for parameter in network.trainable_params())
