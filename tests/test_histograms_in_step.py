"""`InstrumentedStep(histograms=...)`: what is counted, when, and that nothing else changes."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from instrument import Histogram, InstrumentedStep, Metric, Schema, bins
from networks import MLP, Blocks, InAnotherCell, Scaled, adam, mlp_batches, values_of
from reference import MLP as Twin
from test_histograms import twin


def histograms_of(step, batches, call=None):
    return [step.schema.histograms((call or step)(*map(Tensor, batch))[1]) for batch in batches]


ALL = [Histogram("weight", ".", every=1), Histogram("gradient", "weight$", every=1),
       Histogram("activation", "^(act|second)$", every=1)]


@pytest.mark.parametrize("options", [{}, {"loss_scale": 1024.0, "max_grad_norm": 1e-3}, {"activations": None}],
                         ids=lambda o: "+".join(o) or "-")
def test_counts_are_those_of_the_twin(mode, options):
    network = MLP()
    step = InstrumentedStep(network, adam(network), histograms=ALL, **options)
    for x, y in mlp_batches(3):
        weights = {p.name: p.asnumpy().copy() for p in network.get_parameters()}
        _, gradients, outputs, _ = Twin(weights.values()).step(x, y)
        loss, stats = step(Tensor(x), Tensor(y))
        assert stats.shape == (len(step.schema),) and stats.dtype == ms.float32
        seen = step.schema.histograms(stats)
        assert set(seen) == {*(f"histogram/weight/{name}" for name in weights), "histogram/gradient/first.weight",
                             "histogram/gradient/second.weight", "histogram/activation/act", "histogram/activation/second"}
        for name, weight in weights.items():
            assert np.array_equal(seen[f"histogram/weight/{name}"], twin(weight))
        exact = {**{f"gradient/{name}": g for name, g in zip(weights, gradients)},
                 **{f"activation/{name}": a for name, a in outputs.items()}}
        for name in ("gradient/first.weight", "gradient/second.weight", "activation/act", "activation/second"):
            counts, expected = seen[f"histogram/{name}"], twin(exact[name])
            assert counts.sum() == exact[name].size
            # float32 against float64: an element at an edge may fall on either side of it
            assert np.abs(counts - expected).sum() <= 2, name
            assert counts[bins.ZERO] == expected[bins.ZERO]
        assert step.schema.unpack(stats)["step"] > 0


def test_training_is_what_it_is_without(mode):
    weights = []
    for histograms in ([], ALL):
        network = MLP()
        optimizer = adam(network)
        step = InstrumentedStep(network, optimizer, histograms=histograms)
        for batch in mlp_batches(3):
            step(*map(Tensor, batch))
        weights.append(values_of(list(network.get_parameters()) + list(optimizer.get_parameters())))
    assert all(np.array_equal(a, b) for a, b in zip(*weights))


SOME = [Histogram("weight", "^first.weight$", every=2), Histogram("gradient", "^second.weight$", every=3),
        Histogram("activation", "^act$", every=4)]


def skip_needless(mode, where):
    if mode == "pynative" and where != "called":
        pytest.skip("in PyNative mode a cell that lies in another one is called like any other")


@pytest.mark.parametrize("where, accumulate", [("called", 1), ("called", 2), ("in another graph", 2)])
def test_each_has_its_own_every_and_is_absent_in_between(mode, where, accumulate):
    skip_needless(mode, where)
    network = MLP()
    step = InstrumentedStep(network, adam(network), histograms=SOME, accumulate=accumulate)
    call = step if where == "called" else InAnotherCell(step).set_train()
    rows = histograms_of(step, mlp_batches(8 * accumulate), call)[accumulate - 1::accumulate]
    seen = {name: [number for number, row in enumerate(rows, 1) if f"histogram/{name}" in row]
            for name in ("weight/first.weight", "gradient/second.weight", "activation/act")}
    assert seen == {"weight/first.weight": [1, 2, 4, 6, 8], "gradient/second.weight": [1, 3, 6], "activation/act": [1, 4, 8]}
    assert rows[7]["histogram/activation/act"].sum() == 8 * 32 * accumulate
    assert rows[7]["histogram/weight/first.weight"].sum() == 16 * 32
    network = MLP()
    step = InstrumentedStep(network, adam(network), histograms=[Histogram(each.kind, each.pattern, every=1) for each in SOME],
                            accumulate=accumulate)
    always = histograms_of(step, mlp_batches(8 * accumulate))[accumulate - 1::accumulate]
    for some, every in zip(rows, always):
        assert len(every) == 3
        assert all(np.array_equal(counts, every[name]) for name, counts in some.items())


@pytest.mark.parametrize("where", ["called", "in another graph"])
def test_with_a_step_that_is_measured_now_and_then(mode, where):
    skip_needless(mode, where)
    network = MLP()
    step = InstrumentedStep(network, adam(network), every=2, histograms=[
        Histogram("weight", "^first.weight$", every=2), Histogram("activation", "^act$", every=4)])
    call = step if where == "called" else InAnotherCell(step).set_train()
    rows = histograms_of(step, mlp_batches(6), call)
    assert ["histogram/activation/act" in row for row in rows] == [True, False, False, True, True, False]
    assert ["histogram/weight/first.weight" in row for row in rows] == [True] * 6  # the last vector again, which says so


def test_steps_are_counted_from_where_a_run_resumes(mode):
    network = MLP()
    step = InstrumentedStep(network, adam(network), histograms=SOME)
    step.set_step(10)
    rows = histograms_of(step, mlp_batches(2))
    assert [sorted(row) for row in rows] == [[], sorted(f"histogram/{name}" for name in (
        "weight/first.weight", "gradient/second.weight", "activation/act"))]


class Twice(nn.Cell):
    """One cell called twice, with inputs that differ by a power of two."""

    def __init__(self):
        super().__init__()
        weight = np.random.default_rng(5).normal(size=(4, 16))
        self.dense = nn.Dense(16, 4, has_bias=False, weight_init=Tensor(weight, ms.float32))

    def construct(self, x, y):
        return ops.ReduceMean()(ops.square(self.dense(x) + self.dense(x * 4) - y))


def test_calls_and_micro_batches_merge_by_addition(mode):
    network = Twice()
    step = InstrumentedStep(network, adam(network), accumulate=2, histograms=[Histogram("activation", "dense", every=1)])
    for _ in range(3):
        weight = network.dense.weight.asnumpy().astype(np.float64)
        batches = mlp_batches(2)
        for batch in batches:
            _, stats = step(*map(Tensor, batch))
        outputs = [x.astype(np.float64) @ weight.T * factor for x, _ in batches for factor in (1, 4)]
        counts = step.schema.histograms(stats)["histogram/activation/dense"]
        assert counts.sum() == 4 * 8 * 4
        assert np.abs(counts - bins.merge(*map(twin, outputs))).sum() <= 2  # an element at an edge


def test_what_is_not_finite_is_counted(mode):
    network = Scaled(np.array([[1.0, np.nan], [np.inf, 0.0]], np.float32))
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=None, loss_scale=8.0,
                            histograms=[Histogram("weight", "w", every=1), Histogram("gradient", "w", every=1)])
    for _ in range(3):
        seen = step.schema.histograms(step(Tensor(np.array([[np.nan, 2], [0, -np.inf]], np.float32)))[1])
        assert np.array_equal(seen["histogram/weight/w"], twin([1.0, np.nan, np.inf, 0.0]))
        assert np.array_equal(seen["histogram/gradient/w"], twin([np.nan, 2.0, 0.0, -np.inf]))


def test_frozen_weights_are_counted_and_have_no_gradient():
    network = MLP()
    network.second.weight.requires_grad = False
    step = InstrumentedStep(network, adam(network), activations=None, histograms=[Histogram("weight", "second", every=1)])
    assert "histogram/weight/second.weight" in step.schema.histogram_names
    network = MLP()
    network.second.weight.requires_grad = False
    with pytest.raises(ValueError, match="matches no trained parameter.*Near names: .*second.bias"):
        InstrumentedStep(network, adam(network), histograms=[Histogram("gradient", "second.weight")])


def test_taps_removed_weights_go_on(mode):
    network = MLP()
    step = InstrumentedStep(network, adam(network), histograms=ALL)
    histograms_of(step, mlp_batches(1))
    step.remove_taps()
    (row,) = histograms_of(step, mlp_batches(1))
    assert len(row) == 6 and not any("activation" in name for name in row)


def test_a_cell_of_a_list_is_counted(mode):
    network = Blocks()
    step = InstrumentedStep(network, adam(network), histograms=[Histogram("activation", r"^blocks\.\d$", every=1)])
    for _ in range(3):
        seen = step.schema.histograms(step(Tensor(np.ones((2, 8), np.float32)))[1])
        assert list(seen) == [f"histogram/activation/blocks.{i}" for i in range(3)]
        assert [counts.sum() for counts in seen.values()] == [16, 16, 16]


@pytest.mark.parametrize("arguments, message", [
    (("wieght", "."), "`kind` of a Histogram must be one of weight, gradient, activation"),
    (("weight", "("), "not a regular expression"), (("weight", 3), "not a regular expression"),
    (("weight", ".", 0), "`every` of a Histogram"), (("weight", ".", 1.5), "`every` of a Histogram"),
    (("weight", ".", True), "`every` of a Histogram")], ids=str)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Histogram(*arguments)


@pytest.mark.parametrize("histograms, error, message", [
    ([Histogram("weight", "frist.weight")], ValueError, "matches no parameter of the network. Near names: first.weight"),
    ([Histogram("activation", "secnod")], ValueError, "matches no cell of the network. Near names: second"),
    ([Histogram("weight", ".", every=3)], ValueError, "no multiple of the step's, 2"),
    (Histogram("weight", "."), TypeError, "must be a list of instrument.Histogram"), (["."], TypeError, "must be a list")])
def test_refused_by_the_step(histograms, error, message):
    network = MLP()
    with pytest.raises(error, match=message):
        InstrumentedStep(network, adam(network), every=2, histograms=histograms)
    InstrumentedStep(network, adam(network))  # the network is as it was


def test_the_schema_names_histograms_apart():
    schema = Schema([Metric("step", "step", "global", "identical")], ["histogram/weight/a", "histogram/weight/b"])
    assert len(schema) == 1 + 2 * bins.CARRIED
    vector = np.zeros(len(schema), np.float32)
    vector[0] = 7
    vector[1 + bins.CARRIED + 5], vector[1 + bins.CARRIED + bins.BINS + 5] = 2, 3
    assert schema.unpack(vector) == {"step": 7.0}
    (name, counts), = schema.histograms(vector).items()
    assert name == "histogram/weight/b" and counts.tolist() == [0] * 5 + [2 * 4096 + 3] + [0] * (bins.BINS - 6)
    vector[1:] = np.nan
    assert schema.histograms(vector) == {}
    with pytest.raises(ValueError, match="unique"):
        Schema([], ["a", "a"])
    with pytest.raises(ValueError, match="shape"):
        schema.histograms(vector[1:])
