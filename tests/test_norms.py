"""Norms of gradients and weights without the step, of every type and shape."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import reference
from instrument import NormStats, _compat
from networks import MLP, mlp_batches

SHAPES = [(), (1,), (9,), (640,), (5, 3), (130, 64), (130, 64), (2, 3, 4, 5), (1000, 1000), (5000, 64), (1000003,)]

# A float32 sum of up to 256 equal squares is off by up to 3e-7, in two or three stages; a root halves that.
TOLERANCE = 7e-7


def parameters(values, dtype=ms.float32):
    return [Parameter(Tensor(v.astype(np.float32)).astype(dtype), name=f"p{i}") for i, v in enumerate(values)]


def exact(tensor):
    return tensor.astype(ms.float32).asnumpy().astype(np.float64)


def random_values(seed, scale=1.0):
    random = np.random.default_rng(seed)
    return [np.multiply(random.normal(size=shape), scale).astype(np.float32) for shape in SHAPES]


DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": _compat.BFLOAT16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_the_twin(mode, dtype):
    if DTYPES[dtype] is None or (dtype == "bfloat16" and _compat.RELEASE.release < (2, 7)):
        pytest.skip(f"MindSpore {ms.__version__} has no bfloat16 kernels on a CPU")
    weights = parameters(random_values(0), DTYPES[dtype])
    frozen = [Parameter(Tensor(np.full((3, 3), 2.0, np.float32)), name="frozen")]
    cell = NormStats(weights, frozen=frozen, counts=True)
    # 300 squared overflows float16, 1e-15 squared is near the end of float32
    for scale in (1.0, 300.0) if dtype == "float16" else (1.0, 1e-15, 1e15):
        grads = [Tensor(v).astype(DTYPES[dtype]) for v in random_values(1, scale)]
        values = cell.schema.unpack(cell(tuple(grads)))
        assert values["grad/norm"] == pytest.approx(reference.norm(*map(exact, grads)), rel=TOLERANCE)
        assert values["weight/norm"] == pytest.approx(reference.norm(*map(exact, weights), np.full(9, 2.0)), rel=TOLERANCE)
        assert values["weight/norm/frozen"] == pytest.approx(6.0, rel=TOLERANCE)
        assert "grad/norm/frozen" not in cell.schema
        for i, (grad, weight) in enumerate(zip(grads, weights)):
            assert values[f"grad/norm/p{i}"] == pytest.approx(reference.norm(exact(grad)), rel=TOLERANCE)
            assert values[f"weight/norm/p{i}"] == pytest.approx(reference.norm(exact(weight)), rel=TOLERANCE)
            assert values[f"grad/nonfinite/p{i}"] == 0
        assert values["grad/nonfinite"] == 0


@pytest.fixture(scope="module")
def counting():
    cells = {}

    def run(mode, grads):
        if mode not in cells:
            cells[mode] = NormStats(parameters(random_values(0)), counts=True)
        cell = cells[mode]
        return cell.schema.unpack(cell(tuple(map(Tensor, grads))))
    return run


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_parameters_with_a_bad_gradient_are_counted_and_named(mode, counting, bad):
    grads = random_values(1)
    for i in (4, 8):
        grads[i].flat[-1] = bad
    values = counting(mode, grads)
    assert values["grad/nonfinite"] == 2 and not np.isfinite(values["grad/norm"])
    for i in range(len(SHAPES)):
        assert np.isfinite(values[f"grad/norm/p{i}"]) == (i not in (4, 8))
        assert values[f"grad/nonfinite/p{i}"] == (i in (4, 8))


def test_zero_fraction_is_over_all_gradients(mode, counting):
    grads = random_values(1)
    grads[8][:] = 0
    values = counting(mode, grads)
    assert values["grad/zero_fraction"] == pytest.approx(1e6 / sum(g.size for g in grads), rel=1e-6)
    assert values["grad/norm/p8"] == 0


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # 2.0.0 folds constants with NumPy
@pytest.mark.parametrize("magnitude", [1e-25, 1e-18, 1e25])
def test_beyond_the_range_of_a_square_no_number_is_shown(mode, counting, magnitude):
    grads = random_values(1, magnitude)
    values = counting(mode, grads)
    for name in ("grad/norm", *(f"grad/norm/p{i}" for i in range(len(SHAPES)))):
        assert not np.isfinite(values[name]), name
    assert (values["grad/nonfinite"] > 0) == (magnitude > 1)


@pytest.mark.parametrize("magnitude", [1e-25, 3e-20])
@pytest.mark.parametrize("which", [2, 8, 9, 10])  # small, whole rows, narrow rows, a shorter row left over
def test_tensors_whose_sums_cancel_are_still_seen(mode, counting, which, magnitude):
    grads = random_values(1)
    signs = np.where(np.arange(grads[which].size) % 2, -magnitude, magnitude)
    signs[-1] = 0 if signs.size % 2 else signs[-1]
    grads[which] = signs.reshape(grads[which].shape).astype(np.float32)
    assert np.isnan(counting(mode, grads)[f"grad/norm/p{which}"])


def test_the_norm_of_gradients_alone_sees_what_cancels(mode):
    cell = NormStats(parameters([np.ones((100, 100))]))
    grad = Tensor(np.tile(np.array([1e-25, -1e-25], np.float32), (100, 50)))
    assert np.isnan(cell.gradient_norm((grad,)).asnumpy()).all()


def test_a_loop_with_value_and_grad(mode):
    network = MLP()
    trained = network.trainable_params()
    norm_stats = NormStats(trained)
    optimizer = nn.Adam(trained, 1e-2)
    value_and_grad = ms.value_and_grad(network, None, optimizer.parameters)
    for x, y in mlp_batches(3):
        weights = [p.asnumpy().copy() for p in trained]
        _, grads = value_and_grad(Tensor(x), Tensor(y))
        values = norm_stats.schema.unpack(norm_stats(grads))
        optimizer(grads)
        _, expected, _, _ = reference.MLP(weights).step(x, y)
        assert values["grad/norm"] == pytest.approx(reference.norm(*expected), rel=3e-6)
        assert values["weight/norm"] == pytest.approx(reference.norm(*weights), rel=TOLERANCE)


def gradients_of(network):
    return [Tensor(np.ones(p.shape, np.float32)) for p in network.trainable_params()]


WRONG_GRADIENTS = {
    "too few": (lambda grads: grads[:2], "made for 4 gradients, one a parameter in their order, but it is given 2"),
    "too many": (lambda grads: grads + grads[:1], "made for 4 gradients, .* but it is given 5"),
    "another order": (lambda grads: tuple(grads[::-1]),
                      r"gradient of 'first.weight' must be .* shape \(32, 16\), but it is of type Float32 and shape \(4,\)"),
    "no float type": (lambda grads: [grad.astype(ms.int32) for grad in grads], "must be a tensor of a float type .* Int32"),
    "numbers": (lambda grads: [1.0, 2.0, 3.0, 4.0], "must be a tensor of a float type .* but it is no tensor"),
    "one tensor": (lambda grads: grads[0], "given 1"),
}


@pytest.mark.parametrize("case", WRONG_GRADIENTS)
def test_gradients_of_something_else_are_refused(mode, case):
    network = MLP()
    choose, message = WRONG_GRADIENTS[case]
    with pytest.raises(ValueError, match=message):
        NormStats(network.trainable_params())(choose(gradients_of(network)))


def test_one_parameter_whose_gradient_comes_alone(mode):
    cell = NormStats(parameters([np.ones((3, 4))]))
    assert cell.schema.unpack(cell(Tensor(np.full((3, 4), 2.0, np.float32))))["grad/norm"] == pytest.approx(48 ** 0.5)


def test_nothing_to_measure_is_an_error():
    with pytest.raises(ValueError, match="`parameters` must hold at least one"):
        NormStats([])


def test_the_cell_neither_renames_nor_owns_the_parameters():
    network = MLP()
    names = [p.name for p in network.get_parameters()]
    cell = NormStats(network.trainable_params())
    assert [p.name for p in network.get_parameters()] == names and not list(cell.get_parameters())
