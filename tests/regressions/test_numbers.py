"""Numbers that tools of this kind are known to get wrong."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import reference
from instrument import InstrumentedStep, NormStats
from networks import MLP, mlp_batches


@pytest.mark.parametrize("kind", ["constant", "random"])
def test_sixteen_million_elements_keep_their_norm(mode, kind):
    # naive float32 sums of squares are off by 2.7 % here
    x = np.full(2 ** 24, 0.7, np.float32) if kind == "constant" else \
        np.random.default_rng(0).normal(size=2 ** 24).astype(np.float32)
    weight = Parameter(Tensor(x.reshape(4096, 4096)), name="w")
    cell = NormStats([weight], per_parameter=False)
    values = cell.schema.unpack(cell((Tensor(x.reshape(4096, 4096)),)))
    # three stages of at most 256 additions, each off by up to 3e-7 of the sum, halved by the root
    assert values["weight/norm"] == pytest.approx(reference.norm(x), rel=6e-7)
    assert values["grad/norm"] == pytest.approx(reference.norm(x), rel=6e-7)


def test_a_kept_vector_does_not_change_when_training_goes_on(mode):
    # asnumpy() is a view on a CPU: what the step returns must not be memory that it writes again
    network = MLP()
    step = InstrumentedStep(network, nn.Adam(network.trainable_params(), 0.1), accumulate=2)
    kept = [step(*map(Tensor, batch))[1] for batch in mlp_batches(4)]
    views = [stats.asnumpy() for stats in kept]
    copies = [view.copy() for view in views]
    for batch in mlp_batches(4, seed=9):
        step(*map(Tensor, batch))
    assert all(np.array_equal(view, copy, equal_nan=True) for view, copy in zip(views, copies))


class HalfGradient(nn.Cell):
    """A float16 weight whose gradient is 300 everywhere: its square overflows float16."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.ones(64, np.float16)), name="w")

    def construct(self, x):
        return ops.ReduceSum()(ops.cast(self.w * x, ms.float32))


def test_float16_gradients_near_300_are_clipped_to_the_norm_and_not_to_zero(mode):
    network = HalfGradient()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.125), max_grad_norm=8.0, activations=None)
    values = step.schema.unpack(step(Tensor(np.full(64, 300, np.float16)))[1])
    assert values["grad/norm"] == pytest.approx(2400, rel=1e-6) and values["grad/norm_clipped"] == pytest.approx(8, rel=1e-6)
    # each of 64 elements is 300 * 8 / 2400 = 1; half precision holds the result exactly
    assert np.array_equal(network.w.asnumpy(), np.full(64, 1 - 0.125, np.float16))


def test_measuring_with_a_threshold_that_is_never_reached_changes_no_gradient(mode):
    results = []
    for options in ({}, {"max_grad_norm": 1e30}, {"counts": True, "activation_gradients": True, "activations": "leaves"}):
        network = MLP()
        step = InstrumentedStep(network, nn.Adam(network.trainable_params(), 0.01), **options)
        for batch in mlp_batches(3):
            step(*map(Tensor, batch))
        results.append([p.asnumpy().copy() for p in network.get_parameters()])
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other))


def test_nan_is_in_the_vector_on_the_step_on_which_it_happens_and_training_is_not_stopped(mode):
    network = MLP()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1), activations="leaves")
    (x, y), = mlp_batches(1)
    bad = x.copy()
    bad[2, 3] = np.nan
    rows = [step.schema.unpack(step(Tensor(batch), Tensor(y))[1]) for batch in (x, bad, x)]
    assert [np.isfinite(row["grad/norm"]) for row in rows][:2] == [True, False]  # then ReLU, which makes zero of NaN, hides it
    assert [row["activation/nonfinite/first"] for row in rows] == [0, 1, 1]
    # the update of the bad step made the weights NaN, and the vector says which weights this forward used
    assert [np.isfinite(row["weight/norm"]) for row in rows] == [True, True, False]
