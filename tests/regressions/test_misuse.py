"""Uses that would give a wrong number or wrong training without an error."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from instrument import InstrumentedStep, NormStats
from networks import MLP, mlp_batches


class Branches(nn.Cell):
    """Other parts of the loss for other inputs."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.ones(3, np.float32)), name="w")

    def construct(self, x, y=None):
        total = ops.ReduceMean()(ops.square(self.w * x))
        if y is None:
            return {"total": total, "alpha": total * 0 + 1}
        return {"total": total, "beta": total * 0 + 2}


def test_parts_of_a_loss_are_never_shown_under_the_name_of_others(mode):
    network = Branches()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1), activations=None)
    x = Tensor(np.ones(3, np.float32))
    assert step.schema.unpack(step(x)[1])["loss/alpha"] == 1
    if mode == "pynative":
        assert step.schema.unpack(step(x, x)[1])["loss/beta"] == 2
        assert step.schema.unpack(step(x)[1])["loss/alpha"] == 1
        return
    with pytest.raises(ValueError, match=r"other losses \(beta\) than it did before \(alpha\)"):
        step(x, x)
    assert step.schema.unpack(step(x)[1])["loss/alpha"] == 1


def test_an_optimizer_that_unscales_by_itself_is_refused():
    network = MLP()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9, loss_scale=1024.0)
    with pytest.raises(ValueError, match="loss_scale of its own, 1024.0"):
        InstrumentedStep(network, optimizer, loss_scale=1024.0)


class Tiny(nn.Cell):
    """A loss whose gradient underflows when it is squared in float32."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.ones(4, np.float32)), name="w")

    def construct(self, x):
        return ops.ReduceSum()(self.w * x)


@pytest.mark.parametrize("options", [{"loss_scale": 8.0}, {"max_grad_norm": 1.0}], ids=str)
def test_a_tiny_gradient_is_neither_an_overflow_nor_clipped_to_nan(mode, options):
    network = Tiny()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 1.0, weight_decay=0.5), activations=None, **options)
    values = step.schema.unpack(step(Tensor(np.full(4, 1e-25, np.float32)))[1])
    assert values.get("overflow", 0) == 0 and values.get("skipped", 0) == 0 and values["grad/nonfinite"] == 0
    assert np.isnan(values["grad/norm"])  # its squares cannot be told from zero
    assert np.array_equal(network.w.asnumpy(), np.full(4, 0.5, np.float32))  # weight decay happened


def test_parameters_that_are_not_of_a_float_type_have_no_norm():
    with pytest.raises(ValueError, match="'w' is of type Complex64"):
        NormStats([Parameter(Tensor(np.array([1 + 2j], np.complex64)), name="w")])


def test_the_scale_does_not_change_between_calls_that_make_one_update(mode):
    network = MLP()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1), loss_scale=Tensor(1.0, ms.float32),
                            accumulate=2, activations=None)
    batch = list(map(Tensor, mlp_batches(1)[0]))
    step(*batch)
    with pytest.raises(ValueError, match="between the calls that make one update"):
        step.set_sense_scale(Tensor(8.0, ms.float32))
    step(*batch)
    step.set_sense_scale(Tensor(8.0, ms.float32))
    assert float(step.scale_sense.asnumpy()) == 8
