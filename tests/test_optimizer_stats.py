"""Updates and moments against float64 twins, made of what the host sees before and after each step."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import reference
from instrument import Histogram, InstrumentedStep
from instrument.optimizer_stats import moments_of
from networks import MLP, mlp_batches

TOLERANCE = 2e-6  # float32: a quotient of two norms

OPTIMIZERS = {
    "Adam": (lambda p: nn.Adam(p, 1e-2), "moment1", "moment2"),
    "AdamWeightDecay": (lambda p: nn.AdamWeightDecay(p, 1e-2, weight_decay=0.1), "moments1", "moments2"),
    "Momentum": (lambda p: nn.Momentum(p, 1e-2, 0.9), "moments", None),
}


def copies(parameters):
    return [parameter.asnumpy().astype(np.float64) for parameter in parameters]


def cosine(a, b):
    a, b = (np.concatenate([np.ravel(x) for x in (arrays if isinstance(arrays, list) else [arrays])]) for arrays in (a, b))
    return a @ b / np.sqrt((a @ a) * (b @ b))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers(mode, name):
    make, first, second = OPTIMIZERS[name]
    network = MLP()
    optimizer = make(network.trainable_params())
    step = InstrumentedStep(network, optimizer, activations=None, updates=True, moments=True)
    parameters = list(optimizer.parameters)
    names = [parameter.name for parameter in parameters]
    for number, batch in enumerate(mlp_batches(4)):
        before = copies(parameters)
        gradients = reference.MLP(before).step(*batch)[1]
        m, v = copies(getattr(optimizer, first)), copies(getattr(optimizer, second)) if second else None
        values = step.schema.unpack(step(*map(Tensor, batch))[1])
        deltas = [a - b for a, b in zip(copies(parameters), before)]
        assert values["update/norm"] == pytest.approx(reference.norm(*deltas), rel=TOLERANCE)
        assert values["update/ratio"] == pytest.approx(reference.norm(*deltas) / reference.norm(*before), rel=TOLERANCE)
        assert values["moment1/norm"] == pytest.approx(reference.norm(*m), rel=TOLERANCE)
        if second:
            assert values["moment2/norm"] == pytest.approx(reference.norm(*v), rel=TOLERANCE)
        else:
            assert "moment2/norm" not in values
        if number == 0:
            assert np.isnan(values["moment1/cosine"]) and values["moment1/norm"] == 0
        else:
            assert values["moment1/cosine"] == pytest.approx(cosine(gradients, m), abs=1e-5)
        for i, p in enumerate(names):
            assert values[f"update/norm/{p}"] == pytest.approx(reference.norm(deltas[i]), rel=TOLERANCE)
            ratio = reference.norm(deltas[i]) / reference.norm(before[i])
            assert values[f"update/ratio/{p}"] == pytest.approx(ratio, rel=TOLERANCE)
            assert values[f"moment1/norm/{p}"] == pytest.approx(reference.norm(m[i]), rel=TOLERANCE)
            if second:
                assert values[f"moment2/norm/{p}"] == pytest.approx(reference.norm(v[i]), rel=TOLERANCE)
            if number:
                assert values[f"moment1/cosine/{p}"] == pytest.approx(cosine(gradients[i], m[i]), abs=1e-5)


SKIPPING = {"loss scale": {"loss_scale": 2.0}, "spikes": {"spike_window": 2, "skip_spikes": 1e9},
            "both": {"loss_scale": 2.0, "spike_window": 2, "skip_spikes": 1e9, "max_grad_norm": 0.5, "window": 2},
            "histograms": {"loss_scale": 2.0, "histograms": [Histogram("weight", "weight", every=2)]},
            "loss scale, in the one graph": {"loss_scale": 2.0, "spike_window": 2, "every": 2}}


@pytest.mark.parametrize("options", SKIPPING)
def test_the_weights_are_compared_after_the_update_on_every_way_to_it(mode, options):
    in_graph = "every" in SKIPPING[options]
    network = MLP()
    step = InstrumentedStep(network, nn.Momentum(network.trainable_params(), 0.1, 0.9), activations=None, updates=True,
                            **SKIPPING[options])
    step.is_random = in_graph  # as for a network with Dropout: a condition in the one graph
    for number, batch in enumerate(mlp_batches(4), 1):
        before = copies(network.get_parameters())
        values = step.schema.unpack(step(*map(Tensor, batch))[1])
        deltas = [a - b for a, b in zip(copies(network.get_parameters()), before)]
        if values["step"] == number:
            assert values["update/norm"] == pytest.approx(reference.norm(*deltas), rel=TOLERANCE) and values["update/norm"] > 0
    assert values["step"] == 4


@pytest.mark.parametrize("every", [1, 2])
def test_a_skipped_update_is_zero_and_large_parameters_are_right(mode, every):
    shape = (96, 130)  # larger than what is summed raw
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.w = Parameter(Tensor(weight), name="w")

        def construct(self, x):
            return (self.w * x).sum()

    network = Net()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    step = InstrumentedStep(network, optimizer, activations=None, updates=True, moments=True, loss_scale=2.0, every=every)
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    bad = x.copy()
    bad[0, 0] = np.inf
    for number, batch in enumerate((x, bad, x, x), 1):
        before, m = copies([network.w])[0], copies(optimizer.moments)[0]
        values = step.schema.unpack(step(Tensor(batch))[1])
        delta = copies([network.w])[0] - before
        if values["step"] != number:
            assert every == 2 and number == 3
            continue  # the vector of an earlier step
        assert values["update/norm/w"] == values["update/norm"] == pytest.approx(reference.norm(delta), rel=TOLERANCE)
        assert (values["update/norm"] == 0) == bool(values["skipped"]) == (batch is bad)
        if batch is not bad and m.any():
            assert values["moment1/cosine/w"] == pytest.approx(cosine(batch, m), abs=1e-5)


def test_what_has_become_nan_has_no_ratio_to_a_weight_of_zero(mode):
    def values_with(y):
        network = MLP()
        network.first.bias.set_data(Tensor(np.zeros(32, np.float32)))
        step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1), activations=None, updates=True)
        return step.schema.unpack(step(Tensor(x), Tensor(y))[1])

    x, y = mlp_batches(1)[0]
    values = values_with(y)
    assert values["update/norm/first.bias"] > 0 and values["update/ratio/first.bias"] == np.inf
    values = values_with(np.full_like(y, np.nan))
    assert values["weight/norm/first.bias"] == 0
    assert np.isnan([values["update/norm/first.bias"], values["update/ratio/first.bias"], values["update/ratio"]]).all()


@pytest.mark.parametrize("every", [1, 2])
def test_an_optimizer_of_a_part_of_the_network_in_groups(mode, every):
    network = MLP()
    first, second = network.first, network.second
    groups = [{"params": [second.weight], "lr": 0.1}, {"params": [first.bias], "lr": 0.01, "weight_decay": 0.1}]
    optimizer = nn.AdamWeightDecay(groups, 1e-2)
    step = InstrumentedStep(network, optimizer, activations=None, updates=True, moments=True, every=every)
    parts = list(optimizer.parameters)
    assert {part.name for part in parts} == {"second.weight", "first.bias"}
    for number, batch in enumerate(mlp_batches(4), 1):
        before, m = copies(parts), copies(optimizer.moments1)
        gradients = dict(zip((p.name for p in network.trainable_params()),
                             reference.MLP(copies(network.trainable_params())).step(*batch)[1]))
        values = step.schema.unpack(step(*map(Tensor, batch))[1])
        if values["step"] != number:
            continue
        deltas = [a - b for a, b in zip(copies(parts), before)]
        assert values["grad/norm"] == pytest.approx(reference.norm(*(gradients[p.name] for p in parts)), rel=3e-6)
        assert values["update/norm"] == pytest.approx(reference.norm(*deltas), rel=TOLERANCE)
        assert values["moment1/norm"] == pytest.approx(reference.norm(*m), rel=TOLERANCE)
        for part, delta, moment in zip(parts, deltas, m):
            assert values[f"update/norm/{part.name}"] == pytest.approx(reference.norm(delta), rel=TOLERANCE)
            assert values[f"moment1/norm/{part.name}"] == pytest.approx(reference.norm(moment), rel=TOLERANCE)
            if number > 1:
                assert values[f"moment1/cosine/{part.name}"] == pytest.approx(cosine(gradients[part.name], moment), abs=1e-5)
    assert values["step"] == 4 and not any(name.endswith(("first.weight", "second.bias")) for name in values
                                           if name.startswith(("grad/norm", "update/", "moment")))


def test_training_is_what_it_was(mode):
    weights = []
    for options in ({}, {"updates": True, "moments": True}, {"updates": True, "moments": True, "every": 2}):
        network = MLP()
        optimizer = nn.Adam(network.trainable_params(), 1e-2)
        step = InstrumentedStep(network, optimizer, activations=None, **options)
        for batch in mlp_batches(6):
            step(*map(Tensor, batch))
        weights.append([p.asnumpy().copy() for p in list(network.get_parameters()) + list(optimizer.get_parameters())])
    assert all(np.array_equal(a, b) and np.array_equal(a, c) for a, b, c in zip(*weights))


@pytest.mark.compiles
def test_updates_in_the_one_graph_of_a_network_with_dropout():
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.body = MLP()
            self.dropout = nn.Dropout(p=0.1)

        def construct(self, x, y):
            return self.body(self.dropout(x), y)

    network = Net()
    step = InstrumentedStep(network, nn.Adam(network.trainable_params(), 1e-2), updates=True, every=2).set_train()
    weight = network.body.first.weight
    for number, batch in enumerate(mlp_batches(4), 1):
        before = weight.asnumpy().copy()
        values = step.schema.unpack(step(*map(Tensor, batch))[1])
        if values["step"] == number:
            delta = weight.asnumpy().astype(np.float64) - before
            assert values[f"update/norm/{weight.name}"] == pytest.approx(reference.norm(delta), rel=TOLERANCE)
    assert values["step"] == 4 and step.is_random


def test_half_precision_weights_show_what_rounding_left():
    network = MLP(dtype=np.float16)
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 1e-7), activations=None, updates=True)
    batch = [Tensor(a.astype(np.float16)) for a in mlp_batches(1)[0]]
    values = step.schema.unpack(step(*batch)[1])
    assert values["grad/norm"] > 0 and values["update/norm"] == 0


def test_an_optimizer_without_moments_is_refused():
    network = MLP()
    with pytest.raises(ValueError, match="moments=True needs an optimizer that keeps moments, but SGD has none"):
        InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1), moments=True)
    with pytest.raises(ValueError, match="FTRL has none"):  # its `moments` are sums of squared gradients
        InstrumentedStep(network, nn.FTRL(network.trainable_params()), moments=True)
    InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1))  # nothing is left behind
    assert len(moments_of(nn.Adam(network.trainable_params(), 0.1))[1]) == 4


def test_names_and_order():
    network = MLP()
    optimizer = nn.Adam(network.trainable_params(), 1e-2)
    step = InstrumentedStep(network, optimizer, activations=None, updates=True, moments=True, per_parameter=False)
    assert step.schema.names[-5:] == ("moment1/norm", "moment2/norm", "moment1/cosine", "update/norm", "update/ratio")
    assert ms.get_context("mode") == ms.GRAPH_MODE


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # 2.0.0's destructor, of less than a Cell
def test_no_optimizer_of_mindspore_keeps_a_float32_copy_of_half_precision_weights():
    """So updates are measured of the weights themselves. A copy would be a Parameter that holds what the weight does."""
    tried = 0
    for cls in vars(nn).values():
        if not (isinstance(cls, type) and issubclass(cls, nn.Optimizer)) or cls is nn.Optimizer:
            continue
        if cls.__name__ in ("LARS", "OptTFTWrapper"):
            continue  # around another one
        weight = Parameter(Tensor(np.random.default_rng(0).normal(size=(3, 4)).astype(np.float16)), name="w")
        arguments = {"momentum": 0.9} if cls is nn.Momentum else {}
        try:
            optimizer = cls([weight], learning_rate=0.1, **arguments)
        except (TypeError, ValueError):
            continue  # it needs more arguments
        tried += 1
        kept = [each for each in optimizer.get_parameters() if each is not weight and each.shape == weight.shape]
        assert not [each.name for each in kept if np.array_equal(each.asnumpy().astype(np.float16), weight.asnumpy())], cls
    assert tried >= 10
