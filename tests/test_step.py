"""The step: its numbers against float64 twins, and that nothing else changes."""
import copy

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import reference
from instrument import InstrumentedStep
from networks import MLP, Blocks, ConvNet, image_batches, mlp_batches

# float32 carries 1.2e-7 a rounding; forward, backward and reductions of these networks are tens of roundings deep.
TOLERANCE = 3e-6


def adam(network, **kwargs):
    return nn.Adam(network.trainable_params(), 1e-2, **kwargs)


def values_of(parameters):
    return [p.asnumpy().copy() for p in parameters]  # copy: asnumpy is a view on a CPU, and the optimizer writes there


def train(step, batches):
    """Run the batches; returns [(loss, stats)] as NumPy copies."""
    results = []
    for batch in batches:
        loss, stats = step(*map(Tensor, batch))
        results.append((loss.asnumpy().copy(), stats.asnumpy().copy()))
    return results


@pytest.fixture(scope="module")
def measured():
    """Three steps of the MLP with everything on, by mode: [(values, weights before the step, batch)], and the step."""
    runs = {}

    def run(mode):
        if mode not in runs:
            network = MLP()
            step = InstrumentedStep(network, adam(network), activations="leaves", activation_gradients=True, counts=True)
            rows = []
            for batch in mlp_batches(3):
                weights = values_of(network.trainable_params())
                loss, stats = step(*map(Tensor, batch))
                rows.append((step.schema.unpack(stats), weights, batch, float(loss.asnumpy())))
            runs[mode] = step, rows
        return runs[mode]
    return run


def test_one_vector_that_the_schema_names(mode, measured):
    step, rows = measured(mode)
    stats = step(*map(Tensor, mlp_batches(1)[0]))[1]
    assert stats.dtype == ms.float32 and stats.shape == (len(step.schema),)
    assert list(rows[0][0]) == list(step.schema.names)


def test_steps_are_counted_from_one(mode, measured):
    assert [values["step"] for values, *_ in measured(mode)[1]] == [1, 2, 3]


def test_loss_and_norms_equal_the_twin(mode, measured):
    step, rows = measured(mode)
    names = [p.name for p in step.weights]
    for values, weights, batch, returned in rows:
        loss, gradients, _, _ = reference.MLP(weights).step(*batch)
        assert values["loss"] == pytest.approx(loss, rel=TOLERANCE) and returned == values["loss"]
        assert values["grad/norm"] == pytest.approx(reference.norm(*gradients), rel=TOLERANCE)
        assert values["weight/norm"] == pytest.approx(reference.norm(*weights), rel=TOLERANCE)
        for name, gradient, weight in zip(names, gradients, weights):
            assert values[f"grad/norm/{name}"] == pytest.approx(reference.norm(gradient), rel=TOLERANCE)
            assert values[f"weight/norm/{name}"] == pytest.approx(reference.norm(weight), rel=TOLERANCE)
            assert values[f"grad/nonfinite/{name}"] == 0
        zeros = sum(np.sum(g == 0) for g in gradients) / sum(g.size for g in gradients)
        assert values["grad/zero_fraction"] == pytest.approx(zeros, abs=1e-7)
        assert values["grad/nonfinite"] == 0


def test_squares_of_the_layers_add_up_to_the_square_of_the_whole(mode, measured):
    step, rows = measured(mode)
    for group in ("grad", "weight"):
        parts = [value for name, value in rows[-1][0].items() if name.startswith(f"{group}/norm/")]
        assert np.sqrt(np.sum(np.square(parts))) == pytest.approx(rows[-1][0][f"{group}/norm"], rel=1e-6)


def test_activations_and_their_gradients_equal_the_twin(mode, measured):
    _, rows = measured(mode)
    for values, weights, batch, _ in rows:
        _, _, outputs, gradients = reference.MLP(weights).step(*batch)
        for group, tensors in (("activation", outputs), ("activation_grad", gradients)):
            for cell, tensor in tensors.items():
                expected = reference.activation(tensor)
                for stat in expected if group == "activation" else set(expected) - {"count"}:
                    # a mean cancels: its error is relative to the root mean square
                    scale = expected["rms"] if stat == "mean" else abs(expected[stat])
                    assert abs(values[f"{group}/{stat}/{cell}"] - expected[stat]) <= TOLERANCE * scale, (group, stat, cell)


OPTIMIZERS = {"SGD": lambda p: nn.SGD(p, 0.05), "Momentum": lambda p: nn.Momentum(p, 0.05, 0.9),
              "Adam": lambda p: nn.Adam(p, 0.01), "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.01, weight_decay=0.1)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_bit_identical_to_the_stock_step(mode, optimizer):
    results = []
    for kind in (nn.TrainOneStepCell, InstrumentedStep):
        network = MLP()
        made = OPTIMIZERS[optimizer](network.trainable_params())
        step = kind(network, made).set_train()
        losses = [step(*map(Tensor, batch)) for batch in mlp_batches(20)]
        losses = [(loss[0] if isinstance(loss, tuple) else loss).asnumpy() for loss in losses]
        results.append([*losses, *values_of(network.get_parameters()), *values_of(made.get_parameters())])
    assert all(np.array_equal(a, b) for a, b in zip(*results)) and len(results[0]) == len(results[1])


def test_batch_norm_averages_are_those_of_the_stock_step(mode):
    results = []
    for kind in (nn.TrainOneStepCell, InstrumentedStep):
        network = ConvNet()
        with_loss = nn.WithLossCell(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
        step = kind(with_loss, nn.Momentum(network.trainable_params(), 0.05, 0.9)).set_train()
        for batch in image_batches(20):
            step(*map(Tensor, batch))
        results.append({p.name: p.asnumpy().copy() for p in network.get_parameters()})
    twice = ms.__version__ == "2.0.0" and mode == "pynative"  # there the stock step runs the forward twice
    for name, value in results[0].items():
        if twice and "moving" in name:
            continue
        assert np.array_equal(value, results[1][name]), name


def test_the_forward_runs_once(mode):
    network = ConvNet()
    step = InstrumentedStep(nn.WithLossCell(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")),
                            adam(network)).set_train()
    images, labels = image_batches(1)[0]
    convolved = network.conv(Tensor(images)).asnumpy().astype(np.float64)
    step(Tensor(images), Tensor(labels))
    # BatchNorm2d moves its average by a tenth of the batch's mean for each forward
    assert network.norm.moving_mean.asnumpy() == pytest.approx(0.1 * convolved.mean((0, 2, 3)), rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def scaled_losses():
    return {}


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_norms_do_not_depend_on_the_loss_scale(mode, scale):
    network = MLP()
    step = InstrumentedStep(network, adam(network), loss_scale=scale, activation_gradients=True)
    for batch in mlp_batches(3):
        weights = values_of(network.trainable_params())
        values = step.schema.unpack(step(*map(Tensor, batch))[1])
        loss, gradients, _, d_outputs = reference.MLP(weights).step(*batch)
        assert values["loss"] == pytest.approx(loss, rel=TOLERANCE)
        assert values["grad/norm"] == pytest.approx(reference.norm(*gradients), rel=TOLERANCE)
        assert values["activation_grad/rms/act"] == pytest.approx(np.sqrt(np.mean(d_outputs["act"] ** 2)), rel=TOLERANCE)
        assert (values["loss_scale"], values["overflow"], values["skipped"]) == (scale, 0, 0)


def test_an_overflow_skips_the_update_and_the_scale_adapts(mode):
    network = MLP()
    update = nn.DynamicLossScaleUpdateCell(loss_scale_value=2.0 ** 10, scale_factor=2, scale_window=3)
    optimizer = adam(network)
    step = InstrumentedStep(network, optimizer, loss_scale=update)
    x, y = mlp_batches(1)[0]
    bad = x.copy()
    bad[0, 0] = np.inf
    seen, before = [], None
    for i, batch in enumerate([(x, y), (bad, y), (x, y), (x, y), (x, y), (x, y)]):
        before = values_of([*network.trainable_params(), optimizer.moment1[0]])
        values = step.schema.unpack(step(*map(Tensor, batch))[1])
        after = values_of([*network.trainable_params(), optimizer.moment1[0]])
        changed = any(not np.array_equal(a, b) for a, b in zip(before, after))
        assert changed == (i != 1)
        assert np.isfinite(values["grad/norm"]) == (i != 1)
        seen.append((values["loss_scale"], values["overflow"], values["skipped"]))
    assert seen == [(1024, 0, 0), (1024, 1, 1), (512, 0, 0), (512, 0, 0), (512, 0, 0), (1024, 0, 0)]


def test_a_scale_tensor_is_set_from_the_host(mode):
    network = MLP()
    step = InstrumentedStep(network, adam(network), loss_scale=Tensor([8.0], ms.float32), activations=None)
    batch = list(map(Tensor, mlp_batches(1)[0]))
    assert step.schema.unpack(step(*batch)[1])["loss_scale"] == 8
    step.set_sense_scale(Tensor([16.0], ms.float32))
    assert step.schema.unpack(step(*batch)[1])["loss_scale"] == 16


def test_clipping_by_the_global_norm_equals_numpy_and_says_both_norms(mode):
    network = MLP()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 1.0), max_grad_norm=0.5)
    for batch in mlp_batches(3):
        weights = values_of(network.trainable_params())
        values = step.schema.unpack(step(*map(Tensor, batch))[1])
        _, gradients, _, _ = reference.MLP(weights).step(*batch)
        norm = reference.norm(*gradients)
        factor = min(1.0, 0.5 / norm)
        assert values["grad/norm"] == pytest.approx(norm, rel=TOLERANCE)
        assert values["grad/norm_clipped"] == pytest.approx(min(norm, 0.5), rel=TOLERANCE)
        for old, new, gradient in zip(weights, values_of(network.trainable_params()), gradients):
            assert new == pytest.approx(old - factor * gradient, rel=1e-5, abs=1e-6)


def test_a_norm_that_is_not_known_is_not_known_after_clipping_either(mode):
    network = MLP()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 1.0), max_grad_norm=0.5, activations=None)
    x, y = mlp_batches(1)[0]
    x[0, 0] = np.nan
    values = step.schema.unpack(step(Tensor(x), Tensor(y))[1])
    assert np.isnan(values["grad/norm"]) and np.isnan(values["grad/norm_clipped"])


def test_a_fixed_loss_scale_trains_as_the_step_without_one(mode):
    """A power of two, so that scaling is exact. The stock cell with a loss scale does not run on a CPU."""
    results = []
    for scale in (None, nn.FixedLossScaleUpdateCell(1024.0)):
        network = MLP()
        step = InstrumentedStep(network, adam(network), loss_scale=scale, activations=None)
        values = [step.schema.unpack(step(*map(Tensor, batch))[1]) for batch in mlp_batches(4)]
        results.append(values_of(network.trainable_params()))
    assert all(np.array_equal(a, b) for a, b in zip(*results))
    assert {(each["loss_scale"], each["overflow"], each["skipped"]) for each in values} == {(1024, 0, 0)}


class TiedNet(nn.Cell):
    """Two layers with one weight, as embedding and head of a language model."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(16, 16, has_bias=False), nn.Dense(16, 16, has_bias=False)
        self.second.weight = self.first.weight

    def construct(self, x):
        y = self.second(self.first(x))
        return ops.ReduceSum()(y * y)


def test_a_weight_that_two_layers_share_counts_once(mode):
    network = TiedNet()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations="leaves")
    x = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    values = step.schema.unpack(step(Tensor(x))[1])
    w, x = network.first.weight.asnumpy().astype(np.float64), x.astype(np.float64)
    hidden = x @ w.T
    d_out = 2 * hidden @ w.T
    gradient = d_out.T @ hidden + (d_out @ w).T @ x
    names = [name for name in values if name.startswith(("grad/norm/", "weight/norm/"))]
    assert len(names) == 2
    assert values["weight/norm"] == pytest.approx(np.linalg.norm(w), rel=TOLERANCE)
    assert values["grad/norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)


def test_clipping_above_the_norm_changes_nothing(mode):
    results = []
    for max_grad_norm in (None, 1e6):
        network = MLP()
        train(InstrumentedStep(network, adam(network), activations=None, max_grad_norm=max_grad_norm), mlp_batches(5))
        results.append(values_of(network.trainable_params()))
    assert all(np.array_equal(a, b) for a, b in zip(*results))


def test_accumulation_updates_with_the_mean_gradient(mode):
    batches = mlp_batches(6)
    network = MLP()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.5), accumulate=3, activations="leaves")
    twin = [p.astype(np.float64) for p in values_of(network.trainable_params())]
    for i, batch in enumerate(batches):
        loss, stats = step(*map(Tensor, batch))
        values = step.schema.unpack(stats)
        assert float(loss.asnumpy()) == pytest.approx(reference.MLP(twin).step(*batch)[0], rel=TOLERANCE)
        assert values["step"] == (i + 1) // 3
        if i < 2:
            assert np.isnan(values["grad/norm"])
        if i % 3 == 2:
            steps = [reference.MLP(twin).step(*b) for b in batches[i - 2:i + 1]]
            mean = [np.mean(g, axis=0) for g in zip(*(s[1] for s in steps))]
            outputs = np.stack([s[2]["act"] for s in steps])
            assert values["loss"] == pytest.approx(np.mean([s[0] for s in steps]), rel=TOLERANCE)
            assert values["grad/norm"] == pytest.approx(reference.norm(*mean), rel=TOLERANCE)
            assert values["weight/norm"] == pytest.approx(reference.norm(*twin), rel=TOLERANCE)
            assert values["activation/count/act"] == 3
            assert values["activation/rms/act"] == pytest.approx(np.sqrt(np.mean(outputs ** 2)), rel=TOLERANCE)
            assert values["activation/absmax/act"] == pytest.approx(outputs.max((1, 2)).mean(), rel=TOLERANCE)
            twin = [w - 0.5 * g for w, g in zip(twin, mean)]
        for weight, expected in zip(values_of(network.trainable_params()), twin):
            assert weight == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_accumulated_stats_stay_what_they_were_when_the_next_ones_come(mode):
    network = MLP()
    step = InstrumentedStep(network, adam(network), accumulate=2, activations=None)
    outputs = [step(*map(Tensor, batch))[1] for batch in mlp_batches(6)]
    assert [float(stats.asnumpy()[0]) for stats in outputs] == [0, 1, 1, 2, 2, 3]


def test_accumulation_recovers_from_an_overflow(mode):
    network = MLP()
    step = InstrumentedStep(network, adam(network), accumulate=2, loss_scale=4.0, activations=None)
    x, y = mlp_batches(1)[0]
    bad = x.copy()
    bad[0, 0] = np.nan
    rows = [step.schema.unpack(step(Tensor(a), Tensor(y))[1]) for a in (bad, x, x, x)]
    assert rows[1]["skipped"] == 1 and not np.isfinite(rows[1]["grad/norm"])
    assert rows[3]["skipped"] == 0 and np.isfinite(rows[3]["grad/norm"])
    assert all(np.isfinite(w).all() for w in values_of(network.trainable_params()))


def test_per_parameter_off_leaves_the_totals(mode):
    network = MLP()
    step = InstrumentedStep(network, adam(network), per_parameter=False, activations=None)
    assert step.schema.names == ("step", "loss", "grad/norm", "weight/norm", "grad/nonfinite")
    values = step.schema.unpack(step(*map(Tensor, mlp_batches(1)[0]))[1])
    assert values["grad/norm"] > 0


def test_frozen_parameters_have_a_weight_norm_and_no_gradient(mode):
    network = MLP()
    network.first.weight.requires_grad = False
    frozen = network.first.weight.asnumpy().copy()
    step = InstrumentedStep(network, adam(network), activations=None)
    values = step.schema.unpack(step(*map(Tensor, mlp_batches(1)[0]))[1])
    assert values["weight/norm/first.weight"] == pytest.approx(reference.norm(frozen), rel=TOLERANCE)
    assert "grad/norm/first.weight" not in step.schema and "grad/norm/first.bias" in step.schema


def test_running_averages_are_no_weights():
    network = ConvNet()
    step = InstrumentedStep(nn.WithLossCell(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True)), adam(network))
    assert not [name for name in step.schema.names if "moving" in name]


def test_names_keys_and_trainable_parameters_are_untouched():
    network = MLP()
    before = [p.name for p in network.get_parameters()]
    classes = [type(cell) for _, cell in network.cells_and_names()]
    step = InstrumentedStep(network, adam(network), activations="leaves", accumulate=2)
    assert [p.name for p in network.trainable_params()] == before
    assert list(network.parameters_dict()) == before
    assert not [name for name in step.parameters_dict() if "instrument" in name]
    step.remove_taps()
    assert [type(cell) for _, cell in network.cells_and_names()] == classes


def test_the_stock_step_and_ours_save_the_same_keys():
    keys = []
    for kind, options in ((nn.TrainOneStepWithLossScaleCell, {"scale_sense": nn.DynamicLossScaleUpdateCell(8, 2, 10)}),
                          (InstrumentedStep, {"loss_scale": nn.DynamicLossScaleUpdateCell(8, 2, 10)})):
        network = MLP()
        keys.append(sorted(kind(network, adam(network), **options).parameters_dict()))
    assert keys[0] == keys[1]


def test_evaluation_export_and_copies_of_the_network_work(mode, tmp_path):
    network = Blocks()
    x = Tensor(np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))
    expected = network(x).asnumpy()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0))
    first = step.schema.unpack(step(x)[1])
    assert np.array_equal(network(x).asnumpy(), expected)
    assert np.array_equal(copy.deepcopy(network)(x).asnumpy(), expected)
    ms.export(network, x, file_name=str(tmp_path / "network"), file_format="MINDIR")
    assert b"instrument" not in (tmp_path / "network.mindir").read_bytes()
    again = step.schema.unpack(step(x)[1])
    assert {**again, "step": 1} == {**first, "step": 1}
    wider = step.schema.unpack(step(ops.concat((x, x)))[1])  # a new shape compiles anew, with the taps in place
    assert wider["activation/count/blocks.0"] == 1
    assert wider["activation/rms/blocks.0"] == pytest.approx(first["activation/rms/blocks.0"], rel=TOLERANCE)


def test_a_copy_of_the_network_takes_a_step_of_its_own(mode):
    network = Blocks()
    first = InstrumentedStep(network, adam(network))
    twin = copy.deepcopy(network)
    second = InstrumentedStep(twin, adam(twin))
    x = Tensor(np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))
    assert np.array_equal(first(x)[1].asnumpy(), second(x)[1].asnumpy())


def test_removing_taps_leaves_a_step_without_activation_statistics(mode):
    network = Blocks()
    step = InstrumentedStep(network, adam(network))
    x = Tensor(np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))
    step(x)
    step.remove_taps()
    values = step.schema.unpack(step(x)[1])
    assert values["step"] == 2 and values["grad/norm"] > 0
    assert not [name for name in step.schema.names if name.startswith("activation")]


def test_the_step_number_can_go_on_from_a_checkpoint(mode):
    network = MLP()
    step = InstrumentedStep(network, adam(network), activations=None)
    step.set_step(100)
    assert step.schema.unpack(step(*map(Tensor, mlp_batches(1)[0]))[1])["step"] == 101


class Columns:
    """A dataset source."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def test_model_train_and_eval(mode):
    class Seen(ms.train.Callback):
        steps = []

        def step_end(self, run_context):
            loss, stats = run_context.original_args().net_outputs
            self.steps.append(step.schema.unpack(stats)["step"])

    network = ConvNet()
    with_loss = nn.WithLossCell(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
    step = InstrumentedStep(with_loss, adam(network))
    data = ms.dataset.GeneratorDataset(Columns(image_batches(4)), ["image", "label"], shuffle=False)
    ms.train.Model(step).train(2, data, callbacks=[Seen()], dataset_sink_mode=False)
    assert Seen.steps == list(range(1, 9))
    metrics = ms.train.Model(network, eval_network=nn.WithEvalCell(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True)),
                             metrics={"accuracy"}, eval_indexes=[0, 1, 2]).eval(data, dataset_sink_mode=False)
    assert 0 <= metrics["accuracy"] <= 1
