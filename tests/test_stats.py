"""The mathematics against NumPy float64: mode, type, shape, values."""
import mindspore as ms
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mindspore import Tensor, nn

from instrument import _compat, stats

SHAPES = [(), (1,), (7,), (1000003,), (5, 3), (130, 64), (2, 3, 4, 5), (8, 128, 1024), (4097,), (3, 70000)]
DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": _compat.BFLOAT16}

# A float32 sum of 256 equal elements is off by up to 3e-7 of the sum of magnitudes, one of 1,024 by up to 1.3e-6.
SUM = 1.6e-6


class Measure(nn.Cell):
    """All columns of one tensor as a vector."""

    def __init__(self):
        super().__init__()
        self.columns = stats.Columns(stats.COLUMNS)

    def construct(self, x):
        return self.columns(x)


@pytest.fixture(scope="module")
def measure():
    cells = {}

    def run(mode, x):
        cell = cells.setdefault(mode, Measure())
        return dict(zip(stats.COLUMNS, cell(x).asnumpy().astype(np.float64).tolist()))
    return run


def values_of(kind, shape):
    random = np.random.default_rng(0)
    normal = random.normal(size=shape)
    return {"zeros": np.zeros(shape), "constant": np.full(shape, 0.7), "normal": normal, "shifted": 1 + 1e-3 * normal,
            "ties": np.sign(normal) * 2, "sparse": np.where(random.random(shape) < 0.3, normal, 0.0),
            "tiny": normal * 1e-15, "huge": normal * 1e15}[kind]


def rounded(values, dtype):
    """`values` as a Tensor of the type, and what it holds in float64."""
    tensor = Tensor(values.astype(np.float32)).astype(DTYPES[dtype])
    return tensor, tensor.astype(ms.float32).asnumpy().astype(np.float64)


def has_type(dtype):
    return DTYPES[dtype] is not None and not (dtype == "bfloat16" and _compat.RELEASE.release < (2, 7))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_equal_the_twin(mode, dtype, shape, measure):
    if not has_type(dtype):
        pytest.skip(f"MindSpore {ms.__version__} has no bfloat16 kernels on a CPU")
    kinds = ["zeros", "constant", "normal", "shifted", "ties", "sparse"] + (["tiny", "huge"] if dtype == "float32" else [])
    for kind in kinds:
        x, exact = rounded(np.asarray(values_of(kind, shape)), dtype)
        seen = measure(mode, x)
        assert seen["calls"] == 1 and seen["elements"] == exact.size
        assert abs(seen["sum"] - exact.sum()) <= SUM * np.abs(exact).sum(), kind
        assert seen["square_sum"] == pytest.approx((exact ** 2).sum(), rel=SUM), kind
        assert seen["absmax"] == np.abs(exact).max(), kind
        assert seen["zeros"] == (exact == 0).sum(), kind
        assert seen["nonfinite"] == 0, kind


@pytest.mark.parametrize("shape", [(0,), (0, 6), (3, 0)], ids=str)
@pytest.mark.skipif(_compat.RELEASE.release < (2, 7), reason="2.0.0 makes no Tensor without elements")
def test_no_elements_are_no_numbers(mode, shape, measure):
    measure(mode, Tensor(np.full(4096, 4.0), ms.float32))  # leaves something in memory
    empty = Tensor(np.zeros(shape), ms.float32)
    assert measure(mode, empty) == {**dict.fromkeys(stats.COLUMNS, 0), "calls": 1}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (130, 64), (2, 3, 4, 5), (8, 128, 1024)], ids=str)
def test_a_bad_element_anywhere_shows_in_sum_and_square_sum_and_is_counted(mode, shape, bad, measure):
    size = int(np.prod(shape))
    for position in {0, size // 2, size - 1}:
        x = np.ones(size, np.float32)
        x[position] = bad
        seen = measure(mode, Tensor(x.reshape(shape)))
        assert not np.isfinite(seen["sum"]) and not np.isfinite(seen["square_sum"])
        assert np.isnan(seen["square_sum"]) == np.isnan(bad)
        assert seen["nonfinite"] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bad_element_of_half_precision_shows_too(mode, dtype, bad, measure):
    if not has_type(dtype):
        pytest.skip(f"MindSpore {ms.__version__} has no bfloat16 kernels on a CPU")
    x = np.ones((130, 64), np.float32)
    x[77, 7] = bad
    seen = measure(mode, Tensor(x).astype(DTYPES[dtype]))
    assert np.isnan(seen["square_sum"]) == np.isnan(bad) and not np.isfinite(seen["square_sum"]) and seen["nonfinite"] == 1


def test_squares_beyond_float32_show_as_infinity(mode, measure):
    seen = measure(mode, Tensor(np.full((4, 64), 1e25, np.float32)))
    assert np.isinf(seen["square_sum"]) and seen["absmax"] == np.float32(1e25) and np.isfinite(seen["sum"])


FINITE = st.floats(-1e6, 1e6, width=32).filter(lambda v: v == 0 or abs(v) > 1e-6)


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("shape", [(6,), (3, 5)], ids=str)
def test_any_finite_values(shape, data, measure):
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    x = data.draw(hnp.arrays(np.float32, shape, elements=FINITE))
    exact = x.astype(np.float64)
    seen = measure("graph", Tensor(x))
    assert abs(seen["sum"] - exact.sum()) <= 1e-6 * np.abs(exact).sum()
    assert seen["square_sum"] == pytest.approx((exact ** 2).sum(), rel=1e-6)
    assert seen["absmax"] == np.abs(exact).max()
    assert seen["zeros"] == (exact == 0).sum()


class Root(nn.Cell):
    def construct(self, squares, elements, seen):
        return stats.root(squares, elements, seen)


def test_the_root_tells_zero_from_underflow(mode):
    squares = np.array([4.0, 0.0, 0.0, 1e-34, np.inf, np.nan, 1e-28], np.float32)
    seen = np.array([1.0, 0.0, 1e-25, 1e-17, np.nan, np.nan, 1.0], np.float32)
    result = Root()(Tensor(squares), Tensor(np.full(7, 10, np.float32)), Tensor(seen)).asnumpy()
    expected = [2.0, 0.0, np.nan, np.nan, np.inf, np.nan, 1e-14]
    assert np.allclose(result, expected, rtol=1e-6, equal_nan=True)


def test_the_number_of_row_sums_is_what_comes_out(mode):
    for size, length in ((1, 1), (9, 1), (65, 1), (512, 512), (1000, 500), (1009, 512), (300007, 512), (16777216, 256)):
        assert stats.row_sums(Tensor(np.ones(size, np.float32)), length).shape == (stats.number_of_row_sums(size, length),)


class Dynamic(nn.Cell):
    def construct(self, x):
        return stats.element_sum(x)


def test_a_dynamic_axis_is_refused():
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    cell = Dynamic()
    cell.set_inputs(Tensor(shape=[None, 3], dtype=ms.float32))
    with pytest.raises(ValueError, match="static shapes"):
        cell(Tensor(np.ones((2, 3), np.float32)))
