"""Attention: entropies and largest scores against float64, of probes and of MindSpore's own cell, and training as it was."""
import copy

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import reference
from instrument import AttentionProbe, InstrumentedStep, _compat, attention_probe

# Kernels of 2.0.0 are off by 1.4e-6 in log(1); float32 logarithms and sums of rows elsewhere by less.
ABSOLUTE = 4e-6
SCORES_SHAPE = (2, 3, 4, 8)
KEYS = SCORES_SHAPE[-1]
IS_2_0 = ms.__version__.startswith("2.0.")

random = np.random.default_rng(0)
CAUSAL = np.triu(np.ones((4, 8), bool), 1)


def normal(*shape, scale=1.0, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


# ---- any scores and probabilities

class Given(nn.Cell):
    """Probes on what it is given, however strange; weights of 0 join them to the loss."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(SCORES_SHAPE, np.float32)), name="w")
        self.v = Parameter(Tensor(np.zeros(SCORES_SHAPE, np.float32)), name="v")
        self.scores = AttentionProbe()
        self.probabilities = attention_probe("probabilities")

    def construct(self, scores, probabilities):
        # one weight each, since a CPU does not add gradients in bfloat16
        scores = self.scores(scores + ops.cast(self.w, scores.dtype))
        probabilities = self.probabilities(probabilities + ops.cast(self.v, scores.dtype))
        return ops.ReduceSum()(ops.cast(scores, ms.float32)) + ops.ReduceSum()(ops.cast(probabilities, ms.float32))


@pytest.fixture(scope="module")
def measure():
    """Three steps on these scores and probabilities; one compiled step for each mode and type."""
    made = {}

    def values(mode, scores, probabilities=None, dtype=ms.float32):
        if probabilities is None:
            probabilities = np.full(SCORES_SHAPE, 1 / KEYS)
        if (mode, dtype) not in made:
            network = Given()
            made[mode, dtype] = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0))
        step = made[mode, dtype]
        inputs = [Tensor(np.asarray(array, np.float32)).astype(dtype) for array in (scores, probabilities)]
        # other scores in between, since a tap could keep those of the first step
        others = [Tensor(normal(*SCORES_SHAPE, seed=9)).astype(dtype), inputs[1]]
        rows = [step.schema.unpack(step(*given)[1]) for given in (inputs, others, inputs)]
        assert rows[0]["attention/max_logit/scores"] != rows[1]["attention/max_logit/scores"]
        assert {**rows[0], "step": 0} == pytest.approx({**rows[2], "step": 0}, nan_ok=True)
        return rows[2]
    return values


def masked(scores, value):
    return np.where(CAUSAL, np.float32(value), scores)


ROWS = {
    "usual": normal(*SCORES_SHAPE),
    "small": normal(*SCORES_SHAPE, scale=1e-3, seed=1),
    "large": normal(*SCORES_SHAPE, scale=50, seed=2),
    "huge": normal(*SCORES_SHAPE, scale=1e30, seed=2),
    "negative": normal(*SCORES_SHAPE, seed=3) - 1000,
    "masked by -inf": masked(normal(*SCORES_SHAPE, seed=4), -np.inf),
    "masked by -1e9": masked(normal(*SCORES_SHAPE, seed=4), -1e9),
    "masked by the least float": masked(normal(*SCORES_SHAPE, seed=4), np.finfo(np.float32).min),
    "ties": np.round(normal(*SCORES_SHAPE, seed=5)),
}


@pytest.mark.parametrize("case", ROWS)
def test_scores_against_float64(mode, measure, case):
    scores = ROWS[case]
    values = measure(mode, scores)
    expected = reference.attention(scores)
    assert values["attention/entropy/scores"] == pytest.approx(expected["entropy"], abs=ABSOLUTE)
    assert values["attention/max_logit/scores"] == scores.max()  # a maximum is not rounded
    assert values["attention/count/scores"] == 1


def test_a_mask_changes_the_entropy_and_its_value_does_not(mode, measure):
    free, by_infinity, by_number = (measure(mode, scores)["attention/entropy/scores"] for scores in
                                    (normal(*SCORES_SHAPE, seed=4), ROWS["masked by -inf"], ROWS["masked by -1e9"]))
    assert by_infinity == by_number < free - 0.5


@pytest.mark.parametrize("level", [0.0, -3.5, 1e4, -1e9])
def test_uniform_scores_have_the_entropy_of_the_number_of_keys(mode, measure, level):
    """-1e9 throughout: wholly masked by a finite number, which softmax makes uniform."""
    values = measure(mode, np.full(SCORES_SHAPE, level))
    assert values["attention/entropy/scores"] == pytest.approx(np.log(KEYS), abs=ABSOLUTE)
    assert values["attention/max_logit/scores"] == np.float32(level)


def test_all_weight_on_one_key_has_no_entropy(mode, measure):
    hot = np.eye(KEYS)[random.integers(0, KEYS, SCORES_SHAPE[:-1])]
    values = measure(mode, np.where(hot == 1, 0, -np.inf), hot)
    assert abs(values["attention/entropy/scores"]) <= (2e-6 if IS_2_0 else 0)
    assert abs(values["attention/entropy/probabilities"]) <= (2e-6 if IS_2_0 else 0)


@pytest.mark.parametrize("position", [(0, 0, 0, 0), (1, 2, 3, 7), (0, 1, 2, 3)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_show(mode, measure, bad, position):
    scores = masked(normal(*SCORES_SHAPE), -np.inf)
    scores[position] = bad
    probabilities = np.full(SCORES_SHAPE, 1 / KEYS)
    probabilities[position] = np.nan
    values = measure(mode, scores, probabilities)
    assert np.isnan(values["attention/entropy/scores"]) and np.isnan(values["attention/entropy/probabilities"])
    assert values["attention/max_logit/scores"] == pytest.approx(bad, nan_ok=True)


def test_a_row_that_is_minus_infinity_throughout_has_no_entropy_and_does_not_hide_the_maximum(mode, measure):
    scores = normal(*SCORES_SHAPE)
    scores[1, 1, 1] = -np.inf
    values = measure(mode, scores)
    assert np.isnan(values["attention/entropy/scores"])
    assert values["attention/max_logit/scores"] == scores.max()


def test_probabilities_against_float64(mode, measure):
    p = np.exp(ROWS["masked by -inf"].astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    p = p.astype(np.float32)
    assert (p == 0).any()  # 0 ln 0 is 0
    values = measure(mode, ROWS["usual"], p)
    assert values["attention/entropy/probabilities"] == pytest.approx(reference.entropy(p), abs=ABSOLUTE)
    assert "attention/max_logit/probabilities" not in values  # not known, and not made up


@pytest.mark.parametrize("dtype", [ms.float16, *([_compat.BFLOAT16] if _compat.BFLOAT16 is not None else [])], ids=str)
def test_half_precision_is_measured_in_float32(mode, measure, dtype):
    """The scores are the same numbers; their entropy, summed in half precision, would be off by 1e-3."""
    scores = np.round(normal(*SCORES_SHAPE, scale=64, seed=6)) / 64 + np.float32(2.0 ** 15 if dtype == ms.float16 else 0) * (
        normal(*SCORES_SHAPE, seed=7) > 1)
    scores = Tensor(scores.astype(np.float32)).astype(dtype).astype(ms.float32).asnumpy()
    values = measure(mode, scores, dtype=dtype)
    expected = reference.attention(scores)
    assert values["attention/entropy/scores"] == pytest.approx(expected["entropy"], abs=ABSOLUTE)
    assert values["attention/max_logit/scores"] == scores.max()


# ---- a network of several layers that trains

class OwnAttention(nn.Cell):
    """Causal self attention of one head, with a probe that is called twice."""

    def __init__(self, width):
        super().__init__()
        self.query = nn.Dense(width, width, weight_init=Tensor(normal(width, width, scale=0.5, seed=10)), has_bias=False)
        self.probe = AttentionProbe()
        self.softmax = nn.Softmax()
        self.mask = Tensor(np.triu(np.full((4, 4), -1e9), 1), ms.float32)

    def construct(self, x):
        scores = ops.matmul(self.query(x), ops.transpose(x, (0, 2, 1)))
        weights = self.softmax(self.probe(scores + self.mask)) + self.softmax(self.probe(scores * 2 + self.mask))
        return ops.matmul(weights, x)


class Transformer(nn.Cell):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.CellList([nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True) for _ in range(2)])
        self.own = nn.CellList([OwnAttention(8)])
        for i, parameter in enumerate(self.get_parameters()):
            parameter.set_data(Tensor(normal(*parameter.shape, scale=0.6, seed=i)))

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        for layer in self.own:
            x = layer(x)
        return ops.ReduceMean()(x * x)


NAMES = {f"layers.{i}.self_attn" for i in range(2)} | {"own.0.probe"}


def expected_of(network, x):
    """`{(statistic, cell): value}` of one call, of the network's present weights."""
    found = {}
    hidden = Tensor(x)
    for i, layer in enumerate(network.layers):
        scores = reference.attention_scores(weights_of(layer.self_attn), 2, *[hidden.asnumpy()] * 2)
        for stat, value in reference.attention(scores).items():
            found[stat, f"layers.{i}.self_attn"] = value
        hidden = layer(hidden)
    hidden = hidden.asnumpy().astype(np.float64)
    scores = hidden @ network.own[0].query.weight.asnumpy().T.astype(np.float64) @ hidden.transpose(0, 2, 1)
    mask = np.triu(np.full((4, 4), -1e9), 1)
    calls = [reference.attention(scores + mask), reference.attention(scores * 2 + mask)]
    for stat in ("entropy", "max_logit"):
        found[stat, "own.0.probe"] = np.mean([call[stat] for call in calls])
    return found


def weights_of(cell):
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "in_proj_bias", "bias_k")
    return {name: None if getattr(cell, name) is None else getattr(cell, name).asnumpy() for name in names}


def check(values, expected):
    for (stat, cell), value in expected.items():
        # scores are sums of 8 float32 products, and of activations that float32 computed
        assert values[f"attention/{stat}/{cell}"] == pytest.approx(value, rel=2e-5, abs=2e-5), (stat, cell)


def test_training_is_bit_for_bit_what_it_was_and_every_step_is_right(mode):
    batches = [normal(3, 4, 8, seed=20 + i) for i in range(4)]
    plain, network = Transformer(), Transformer()
    names = [parameter.name for parameter in network.get_parameters()]
    stock = nn.TrainOneStepCell(plain, nn.Adam(plain.trainable_params(), 0.05)).set_train()
    step = InstrumentedStep(network, nn.Adam(network.trainable_params(), 0.05), activations=None).set_train()
    assert [parameter.name for parameter in network.get_parameters()] == names == [p.name for p in plain.get_parameters()]
    seen = []
    for x in batches:
        expected = expected_of(plain, x)
        loss, stats = step(Tensor(x))
        values = step.schema.unpack(stats)
        check(values, expected)
        assert {name.split("/")[2] for name in values if name.startswith("attention/")} == NAMES
        assert values["attention/count/own.0.probe"] == 2 and values["attention/count/layers.1.self_attn"] == 1
        seen.append(values["attention/max_logit/layers.0.self_attn"])
        if IS_2_0 and mode == "pynative":  # adds gradients in another order where a cell has a bprop, as any tap does
            assert stock(Tensor(x)).asnumpy() == pytest.approx(loss.asnumpy(), rel=1e-5)
            for ours, theirs in zip(network.get_parameters(), plain.get_parameters()):
                theirs.set_data(Tensor(ours.asnumpy()))
            continue
        assert stock(Tensor(x)).asnumpy().tobytes() == loss.asnumpy().tobytes()
        for ours, theirs in zip(network.get_parameters(), plain.get_parameters()):
            assert ours.asnumpy().tobytes() == theirs.asnumpy().tobytes(), ours.name
    assert len(set(seen)) == len(seen)

    # The network by itself is what it was: evaluation, a copy, and without taps.
    expected = plain(Tensor(batches[0])).asnumpy()
    assert network(Tensor(batches[0])).asnumpy().tobytes() == expected.tobytes()
    assert copy.deepcopy(network)(Tensor(batches[0])).asnumpy().tobytes() == expected.tobytes()
    step.remove_taps()
    assert type(network.own[0].probe) is AttentionProbe and type(network.layers[0].self_attn) is nn.MultiheadAttention
    assert not any(name.startswith("attention/") for name in step.schema.names)


def test_dropout_accumulation_and_every_second_step(mode):
    """Scores are those before Dropout. With it the graph decides itself what is measured."""
    network = Transformer(dropout=0.5)
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=None, accumulate=2, every=2)
    step.set_train()
    batches = [normal(3, 4, 8, seed=40 + i) for i in range(8)]
    rows = [step.schema.unpack(step(Tensor(x))[1]) for x in batches][1::2]
    assert [row["step"] for row in rows] == [1, 2, 2, 4]
    weights = weights_of(network.layers[0].self_attn)
    for row in rows:
        first = int(2 * row["step"] - 2)
        calls = [reference.attention(reference.attention_scores(weights, 2, x, x)) for x in batches[first:first + 2]]
        assert row["attention/count/layers.0.self_attn"] == 2
        check(row, {(stat, "layers.0.self_attn"): np.mean([call[stat] for call in calls]) for stat in calls[0]})


# ---- nn.MultiheadAttention in all its forms

class Cross(nn.Cell):
    def __init__(self, form, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)
        self.form = form
        for i, parameter in enumerate(self.get_parameters()):
            parameter.set_data(Tensor(normal(*parameter.shape, scale=0.5, seed=60 + i)))

    def construct(self, query, key, attn_mask, key_padding_mask):
        if self.form == "both":
            y = self.attention(query, key, key, key_padding_mask=key_padding_mask, attn_mask=attn_mask, need_weights=False)[0]
        elif self.form == "pairs":
            y = self.attention(query, key, key, attn_mask=attn_mask)[0]
        elif self.form == "keys":
            y, weights = self.attention(query, key, key, key_padding_mask)
            y = y * ops.ReduceSum()(weights)
        else:
            y = self.attention(query, key, key)[0]
        return ops.ReduceMean()(y * y)


PAIRS = np.triu(np.ones((5, 6), bool), 2)
KEYS_LEFT_OUT = np.array([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]], bool)
FORMS = {
    "pairs": ("pairs", {}, (5, 3, 8), (6, 3, 8)),
    "keys, batch first, other widths": ("keys", {"batch_first": True, "kdim": 7, "vdim": 7}, (3, 5, 8), (3, 6, 7)),
    "both, more keys": ("both", {"add_bias_kv": True, "add_zero_attn": True}, (5, 3, 8), (6, 3, 8)),
    "no bias, no batch": ("none", {"has_bias": False}, (5, 8), (6, 8)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_scores_of_multihead_attention_against_float64(mode, form):
    masks, options, query_shape, key_shape = FORMS[form]
    network = Cross(masks, **options)
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=[nn.MultiheadAttention])
    query, key = normal(*query_shape, seed=1), normal(*key_shape, seed=2)
    # MindSpore 2.0.0 does not compile the gradient of a bool mask
    as_float = [np.where(mask, -np.inf, 0).astype(np.float32) for mask in (PAIRS, KEYS_LEFT_OUT)]
    given = as_float if IS_2_0 else (PAIRS, KEYS_LEFT_OUT)
    for i in range(3):
        inputs = [Tensor(array) for array in (query + np.float32(i), key, *given)]
        values = step.schema.unpack(step(*inputs)[1])
        scores = reference.attention_scores(
            weights_of(network.attention), 2, query + np.float32(i), key, batch_first=options.get("batch_first", False),
            pairs=PAIRS if masks in ("both", "pairs") else None, keys=KEYS_LEFT_OUT if masks in ("both", "keys") else None,
            has_zero_key=options.get("add_zero_attn", False))
        check(values, {(stat, "attention"): value for stat, value in reference.attention(scores).items()})
        assert np.isfinite(values["attention/entropy/attention"])
        # the cell is chosen as well, and so has both taps
        assert values["activation/count/attention"] == 1 and values["activation/rms/attention"] > 0


# ---- what is chosen

class Derived(nn.MultiheadAttention):
    def construct(self, query, key, value):
        return query


class Holder(nn.Cell):
    def __init__(self, cell):
        super().__init__()
        self.w = Parameter(Tensor(np.ones(1, np.float32)), name="w")
        self.cell = cell

    def construct(self, x):
        return ops.ReduceSum()(x * self.w)


def attention_names(network, **options):
    step = InstrumentedStep(network, nn.SGD([network.w], 0.0), activations=None, **options)
    return [name for name in step.schema.names if name.startswith("attention/")]


def test_what_is_measured_of_which_cell():
    stats = ["count", "max_logit", "entropy"]
    assert attention_names(Holder(AttentionProbe())) == [f"attention/{stat}/cell" for stat in stats]
    assert attention_names(Holder(attention_probe("probabilities"))) == ["attention/count/cell", "attention/entropy/cell"]
    for layer, inner in ((nn.TransformerEncoderLayer(8, 2), ["self_attn"]),
                         (nn.TransformerDecoderLayer(8, 2), ["self_attn", "multihead_attn"])):
        assert attention_names(Holder(layer)) == [f"attention/{stat}/cell.{name}" for name in inner for stat in stats]
    assert attention_names(Holder(Derived(8, 2))) == []  # what its construct does is not known


def test_attention_can_be_left_out():
    network = Holder(nn.SequentialCell(AttentionProbe(), nn.MultiheadAttention(8, 2)))
    assert attention_names(network, attention=False) == []
    assert type(network.cell[0]) is AttentionProbe and type(network.cell[1]) is nn.MultiheadAttention


def test_units_and_merge_rules():
    network = Holder(AttentionProbe())
    schema = InstrumentedStep(network, nn.SGD([network.w], 0.0), activations=None, scope="local").schema
    metrics = {name: schema[f"attention/{name}/cell"] for name in ("count", "max_logit", "entropy")}
    assert {name: (metric.unit, metric.merge) for name, metric in metrics.items()} == {
        "count": ("calls", "sum"), "max_logit": ("1", "mean_of_max"), "entropy": ("nats", "mean")}
    assert {metric.scope for metric in metrics.values()} == {"local"}


def test_a_probe_has_no_parameters_and_is_an_identity():
    probe = AttentionProbe()
    x = Tensor([[1.0, 2.0]])
    assert list(probe.get_parameters()) == [] and probe(x) is x


@pytest.mark.parametrize("kind", ["logits", None, Tensor([1.0, 2.0])], ids=lambda kind: type(kind).__name__)
def test_another_kind_and_a_call_without_a_cell_are_refused(kind):
    with pytest.raises(ValueError, match="in __init__"):
        attention_probe(kind)


def test_a_probe_that_is_not_called_is_absent_with_a_warning(mode):
    network = Holder(AttentionProbe())
    step = InstrumentedStep(network, nn.SGD([network.w], 0.0), activations=None)
    stats = step(Tensor([1.0]))[1]
    with pytest.warns(UserWarning, match="attention of cell 'cell'.*attention=False"):
        values = step.schema.unpack(stats)
    assert [name for name in values if name.startswith("attention/")] == ["attention/count/cell"]


class Called(Holder):
    def construct(self, x):
        return ops.ReduceSum()(ops.cast(self.cell(x), ms.float32) * self.w)


@pytest.mark.parametrize("x, error, match", [([1, 2], TypeError, "'cell'.*float"), (1.0, ValueError, "last axis")])
def test_what_has_no_rows_of_float_type_is_refused(mode, x, error, match):
    network = Called(AttentionProbe())
    step = InstrumentedStep(network, nn.SGD([network.w], 0.0), activations=None)
    with pytest.raises(error, match=match):
        step(Tensor(x))
        step.schema.unpack(step(Tensor(x))[1])
    step.remove_taps()
    step(Tensor(x))
