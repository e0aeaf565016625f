"""Histograms against an independent NumPy twin: counts, merging, quantiles."""
import mindspore as ms
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mindspore import Tensor, nn

from instrument import _compat, bins, histograms

DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": _compat.BFLOAT16}
SHAPES = [(), (1,), (1, 1, 1), (7,), (5, 3), (2, 3, 4, 5), (130, 64), (1000003,)]
MAX = float(np.finfo(np.float32).max)


def twin(values):
    """Counts by the definition, in float64: negative exponents downward, zeros, positive ones upward, what is not finite."""
    values = np.asarray(values, np.float64).reshape(-1)
    counts = np.zeros(130, np.int64)
    finite = np.isfinite(values)
    counts[129] = np.sum(~finite)
    counts[64] = np.sum(np.abs(values) < 2.0 ** -126)
    values = values[finite & (np.abs(values) >= 2.0 ** -126)]
    exponents = np.clip(np.frexp(values)[1] - 1, -40, 23)
    for where, number in zip(*np.unique(64 + (exponents + 41) * np.sign(values).astype(int), return_counts=True)):
        counts[where] = number
    return counts


class Carried(nn.Cell):
    def construct(self, x):
        return histograms.carried(histograms.log2_counts(x))


class Log2Counts(nn.Cell):
    """`log2_counts` as a cell, to be compiled."""

    def construct(self, x):
        return histograms.log2_counts(x)


@pytest.fixture(scope="module")
def count():
    cells = {}

    def run(mode, x):
        return cells.setdefault(mode, Log2Counts())(x).asnumpy()
    return run


def rounded(values, dtype):
    """`values` as a Tensor of the type, and what it holds in float64."""
    if DTYPES[dtype] is None or (dtype == "bfloat16" and _compat.RELEASE.release < (2, 7)):
        pytest.skip(f"MindSpore {ms.__version__} has no bfloat16 kernels on a CPU")
    tensor = Tensor(np.asarray(values, np.float32)).astype(DTYPES[dtype])
    return tensor, tensor.astype(ms.float32).asnumpy().astype(np.float64)


def powers_and_neighbours():
    powers = np.float32(2.0) ** np.arange(-126, 128, dtype=np.float32)
    with np.errstate(under="ignore"):
        around = np.concatenate([np.nextafter(powers, np.float32(0)), powers, np.nextafter(powers, np.float32(np.inf))])
    return np.concatenate([around, -around])


ODD = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-30, -1e-30, 1e30, -1e30, MAX, -MAX, 1e-40, -1e-40, 1.0, -1.0],
               np.float32)


def values_of(kind, shape):
    random = np.random.default_rng(0)
    normal = random.normal(size=shape)
    return {"zeros": np.zeros(shape), "constant": np.full(shape, -0.7), "normal": normal,
            "ones": np.ones(shape), "sparse": np.where(random.random(shape) < 0.3, normal, 0.0),
            "wide": normal * np.exp2(random.uniform(-60, 40, shape))}[kind]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_equal_the_twin_and_sum_to_the_elements(mode, dtype, shape, count):
    for kind in ("zeros", "constant", "normal", "ones", "sparse", "wide"):
        values = np.clip(values_of(kind, shape), -6e4, 6e4) if dtype == "float16" else values_of(kind, shape)
        x, exact = rounded(values, dtype)
        seen = count(mode, x)
        assert seen.dtype == np.int32 and seen.sum() == exact.size, kind
        assert np.array_equal(seen, twin(exact)), kind


def test_the_twin_is_right_where_it_can_be_told_by_hand():
    assert np.flatnonzero(twin([1.0])).tolist() == [105] and np.flatnonzero(twin([-1.0])).tolist() == [23]
    assert np.flatnonzero(twin([2.0 ** -40, 1e-30])).tolist() == [65]
    assert np.flatnonzero(twin([2.0 ** 23, 1e30])).tolist() == [128]
    assert twin([0.0, -0.0, 1e-40])[64] == 3 and twin([np.nan, np.inf, -np.inf])[129] == 3


def test_powers_of_two_and_their_neighbours(mode, count):
    values = powers_and_neighbours()
    assert np.array_equal(count(mode, Tensor(values)), twin(values))
    for value in values[np.abs(values) < 1e9][::7]:
        assert count(mode, Tensor(np.full(3, value))).argmax() == twin([value]).argmax(), value


@pytest.mark.parametrize("size", [len(ODD), 300007])  # one thread, several threads
def test_zeros_denormals_infinities_and_nan(mode, size, count):
    values = np.resize(ODD, size)
    seen = count(mode, Tensor(values))
    assert np.array_equal(seen, twin(values)) and seen.sum() == size
    for value in ODD:
        assert np.array_equal(count(mode, Tensor(np.full(size, value))), twin(np.full(size, value))), value


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_what_is_not_finite_and_its_smallest_numbers(mode, dtype, count):
    x, exact = rounded(np.array([np.nan, np.inf, -np.inf, 6e-8, -6e-8, 65504, -65504, 0.0]), dtype)
    assert np.array_equal(count(mode, x), twin(exact)) and twin(exact)[129] == 3


@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("shape", [(6,), (3, 5)], ids=str)
@pytest.mark.compiles
def test_any_values(shape, data, count):
    x = data.draw(hnp.arrays(np.float32, shape, elements=st.floats(width=32)))
    assert np.array_equal(count("graph", Tensor(x)), twin(x))


def test_what_is_carried_adds_up(mode):
    random = np.random.default_rng(1)
    arrays = [random.normal(size=(1000, 50)).astype(np.float32) * scale for scale in (1, 1e-3, 0)]
    cell = Carried()
    summed = sum(cell(Tensor(array)).asnumpy() for array in arrays)
    assert summed.dtype == np.float32 and summed.shape == (bins.CARRIED,)
    assert np.array_equal(bins.from_carried(summed), twin(np.concatenate(arrays)))


class CarriedOfCounts(nn.Cell):
    def construct(self, counts):
        return histograms.carried(counts)


def test_counts_beyond_2_to_the_24_are_carried_exactly(mode):
    counts = np.zeros(bins.BINS, np.int32)
    counts[:8] = [2 ** 31 - 1, 2 ** 24, 2 ** 24 + 1, 2 ** 24 - 1, 4095, 4096, 4097, 2 ** 30 + 12345]
    cell = CarriedOfCounts()
    vector = cell(Tensor(counts)).asnumpy()
    assert np.array_equal(bins.from_carried(vector), counts)
    total = np.zeros_like(vector)
    for _ in range(16):
        total = total + vector  # in float32, as gradients of a slot are added
    assert total.dtype == np.float32 and np.array_equal(bins.from_carried(total), 16 * counts.astype(np.int64))
    one_float = np.float32(0)
    for _ in range(16):
        one_float = one_float + np.float32(counts[2])
    assert int(one_float) != 16 * int(counts[2])  # what one float32 a count would have come to


def test_as_many_vectors_as_promised_add_up():
    counts = np.full(bins.BINS, 2 ** 24 - 1)
    total = np.zeros(bins.CARRIED, np.float32)
    vector = np.concatenate([counts // bins.PART, counts % bins.PART]).astype(np.float32)
    for _ in range(4096):
        total = total + vector
    assert total.dtype == np.float32 and np.array_equal(bins.from_carried(total), 4096 * counts)


def test_merge_is_the_histogram_of_all():
    random = np.random.default_rng(2)
    first, second = random.normal(size=100), random.normal(size=50) * 1e-9
    assert np.array_equal(bins.merge(twin(first), twin(second)), twin(np.concatenate([first, second])))
    assert bins.merge(twin(first).astype(np.int32), np.full(bins.BINS, 2 ** 31 - 1, np.int32)).dtype == np.int64


@pytest.mark.parametrize("counts", [np.zeros(3, int), np.zeros(bins.BINS), np.full(bins.BINS, -1)],
                         ids=["short", "float", "negative"])
def test_what_is_no_histogram_is_refused(counts):
    with pytest.raises(ValueError, match="counts must be 130 whole numbers"):
        bins.merge(counts)
    with pytest.raises(ValueError, match="counts must be 130 whole numbers"):
        bins.quantiles(counts, 0.5)


def test_merging_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        bins.merge()


@pytest.mark.parametrize("q", [-0.1, 1.1, np.nan, [0.5, 2.0]])
def test_fractions_out_of_range_are_refused(q):
    with pytest.raises(ValueError, match="between 0 and 1"):
        bins.quantiles(twin([1.0]), q)


def test_edges_enclose_what_is_counted_between_them():
    edges = bins.edges()
    assert edges.shape == (130,) and (np.diff(edges) > 0).all()
    for value in (-3.0, -1e-9, 0.0, 1e-9, 0.75, 5e6):
        (where,) = np.flatnonzero(twin([value]))
        assert edges[where] <= value < edges[where + 1]


IN_RANGE = st.floats(2.0 ** -40, 2.0 ** 24, exclude_max=True)


@given(values=st.lists(st.one_of(IN_RANGE, IN_RANGE.map(lambda v: -v), st.just(0.0)), min_size=1, max_size=60),
       q=st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_quantiles_are_right_within_a_factor_of_two(values, q):
    exact = np.sort(values)[max(int(np.ceil(q * len(values))), 1) - 1]
    seen = bins.quantiles(twin(values), q)
    assert np.sign(seen) == np.sign(exact)
    assert seen == exact if exact == 0 else 0.5 < seen / exact < 2


@given(values=st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=40), q=st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_quantiles_of_what_is_beyond_the_bins(values, q):
    exact = np.sort(values)[max(int(np.ceil(q * len(values))), 1) - 1]
    seen = bins.quantiles(twin(values), q)
    if abs(exact) < 2.0 ** -39:
        assert abs(seen - exact) < 2.0 ** -39
    elif abs(exact) >= 2.0 ** 23:
        assert 2.0 ** 23 <= seen / np.sign(exact) <= 2.0 ** 24


def test_quantiles_of_many_fractions_rise_and_ignore_what_is_not_finite():
    values = np.random.default_rng(3).normal(size=1000)
    q = np.linspace(0, 1, 101).reshape(1, 101)
    seen = bins.quantiles(twin(np.append(values, [np.nan, np.inf])), q)
    assert seen.shape == q.shape and (np.diff(seen[0]) >= 0).all()
    assert np.array_equal(seen, bins.quantiles(twin(values), q))
    assert np.isnan(bins.quantiles(twin([np.nan]), 0.5)) and np.isnan(bins.quantiles(twin([]), [0.5, 0.1])).all()
