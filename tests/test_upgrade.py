"""A stock training step with measurements added: the numbers, and that it stays what it was."""
from __future__ import annotations

import gc

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import reference
from instrument import Histogram, InstrumentedStep, remove_taps
from instrument.upgrade import CannotUpgrade, StepOptions, find_step, upgrade
from networks import InAnotherCell

STEPS = 4


def batch(i):
    random = np.random.RandomState(100 + i)
    return Tensor(random.normal(size=(5, 8)), ms.float32), Tensor(random.normal(size=(5, 4)), ms.float32)


def parts(optimizer=nn.Adam):
    """A network with a loss, of which all runs begin with the same weights, and its optimizer."""
    net = nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 4))
    random = np.random.RandomState(3)
    for parameter in net.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape) * 0.3, ms.float32))
    return nn.WithLossCell(net, nn.MSELoss()), optimizer(net.trainable_params(), 1e-2)


def plain(network, optimizer):
    return nn.TrainOneStepCell(network, optimizer)


def sensitive(network, optimizer):
    return nn.TrainOneStepCell(network, optimizer, sens=32.0)


def scaled(network, optimizer):
    return nn.TrainOneStepWithLossScaleCell(network, optimizer, nn.DynamicLossScaleUpdateCell(2.0 ** 10, 2, 3))


def weights(step):
    return {p.name: p.asnumpy().copy() for p in step.network.get_parameters()}


def twin(before, i):
    """(loss, gradients, outputs, gradients of outputs) in float64."""
    x, y = (each.asnumpy() for each in batch(i))
    return reference.MLP(list(before.values())).step(x, y)


def check(step, before, i, scale):
    values = step.schema.unpack(step.snapshot())
    loss, gradients, outputs, output_gradients = twin(before, i)
    # Float32 sums of at most 128 elements.
    assert values["step"] == i + 1
    assert values["loss"] == pytest.approx(loss, rel=1e-6)
    assert values["grad/norm"] == pytest.approx(reference.norm(*gradients), rel=1e-6)
    assert values["weight/norm"] == pytest.approx(reference.norm(*before.values()), rel=1e-6)
    assert values.get("loss_scale") == scale
    for name, gradient in zip(before, gradients):
        assert values[f"grad/norm/{name}"] == pytest.approx(reference.norm(gradient), rel=1e-6)
    for name, cell in (("first", "_backbone.0"), ("act", "_backbone.1"), ("second", "_backbone.2")):
        for group, output in (("activation", outputs[name]), ("activation_grad", output_gradients[name])):
            expected = reference.activation(output)
            assert values[f"{group}/rms/{cell}"] == pytest.approx(expected["rms"], rel=1e-6)
            assert values[f"{group}/absmax/{cell}"] == pytest.approx(expected["absmax"], rel=1e-6)
        assert values[f"activation/count/{cell}"] == 1
    return values


@pytest.mark.parametrize("make", [plain, sensitive, scaled])
def test_numbers_equal_numpy(mode, make):
    step = upgrade(make(*parts()), StepOptions(activations="leaves", activation_gradients=True, updates=True, moments=True))
    for i in range(STEPS):
        before = weights(step)
        step(*batch(i))
        values = check(step, before, i, None if make is not scaled else 2.0 ** (10 + i // 3))
        change = [after - then.astype(np.float64) for after, then in zip(weights(step).values(), before.values())]
        assert values["update/norm"] == pytest.approx(reference.norm(*change), rel=1e-5)  # of weights that are rounded
        assert (values["moment1/norm"] > 0) == (i > 0)


@pytest.mark.parametrize("make, optimizer", [(plain, nn.Adam), (sensitive, nn.SGD)])
def test_training_is_what_it_was_to_the_bit(mode, make, optimizer):
    stock, measured = make(*parts(optimizer)), make(*parts(optimizer))
    keys = list(measured.parameters_dict())
    upgrade(measured, StepOptions(activations="leaves", activation_gradients=True, counts=True))
    for i in range(STEPS):
        assert np.array_equal(stock(*batch(i)).asnumpy(), measured(*batch(i)).asnumpy())
    assert list(measured.parameters_dict()) == keys
    for name, parameter in stock.parameters_dict().items():
        assert np.array_equal(parameter.asnumpy(), measured.parameters_dict()[name].asnumpy()), name


def test_a_step_with_a_loss_scale_returns_three_elements_and_skips_an_overflow(mode):
    step = upgrade(scaled(*parts()))
    step(*batch(0))
    before = weights(step)
    x, y = batch(1)
    outputs = step(Tensor(np.full((5, 8), 1e30), ms.float32), y)
    assert len(outputs) == 3 and bool(outputs[1].asnumpy())
    values = step.schema.unpack(step.snapshot())
    assert (values["step"], values["overflow"], values["skipped"], values["loss_scale"]) == (2, 1, 1, 1024)
    assert all(np.array_equal(now, then) for now, then in zip(weights(step).values(), before.values()))
    step(x, y)
    assert step.schema.unpack(step.snapshot())["loss_scale"] == 512


def test_every_second_step_is_measured(mode):
    step = upgrade(plain(*parts()), StepOptions(every=2, activations="leaves", activation_gradients=True))
    vectors = []
    for i in range(6):
        before = weights(step)
        step(*batch(i))
        vectors.append(step.snapshot())
        if i in (0, 1, 3, 4):
            check(step, before, i, None)
        if i == 3:
            step.measure_next()
    assert [vector.asnumpy()[0] for vector in vectors] == [1, 2, 2, 4, 5, 6]
    assert vectors[2] is vectors[1]  # nothing is copied where nothing was measured


def test_counting_goes_on_from_a_step(mode):
    step = upgrade(plain(*parts()), StepOptions(every=4, activations=None))
    step.set_step(100)
    steps = []
    for i in range(5):
        step(*batch(i))
        steps.append(step.snapshot().asnumpy()[0])
    assert steps == [101, 101, 101, 104, 104]  # the first one that a step makes is measured in any case


def test_window_histograms_and_spikes(mode):
    histograms = [Histogram("weight", "weight", 2), Histogram("activation", "0", 1)]
    step = upgrade(plain(*parts()), StepOptions(window=3, spike_window=2, activations=None, histograms=histograms))
    for i in range(STEPS):
        step(*batch(i))
    rows, overwritten = step.read_window()
    assert list(rows[:, 0]) == [2, 3, 4] and overwritten == 1
    counts = [step.schema.histograms(row) for row in rows]
    assert [sum(each.sum() for name, each in row.items() if "weight/" in name) for row in counts] == [192, 0, 192]
    assert [row["histogram/activation/_backbone.0"].sum() for row in counts] == [80] * 3
    scores = rows[:, step.schema.index("spike/score")]
    assert np.isnan(scores[0]) and np.isfinite(scores[1:]).all()  # two good steps have to be known


def test_taps_come_off_again(mode):
    step = upgrade(plain(*parts()), StepOptions(activations="leaves"))
    step(*batch(0))
    step.remove_taps()
    assert all("instrument" not in repr(vars(type(cell))) for _, cell in step.network.cells_and_names())
    step(*batch(1))
    values = step.schema.unpack(step.snapshot())
    assert values["step"] == 2 and not [name for name in values if name.startswith("activation")]


def test_steps_are_counted_on_after_taps_are_removed(mode):
    step = upgrade(plain(*parts()), StepOptions(every=4, activations="leaves"))
    for i in range(10):
        step(*batch(i))
    step.remove_taps()
    seen = []
    for i in range(10, 20):
        step(*batch(i))
        seen.append(int(step.schema.unpack(step.snapshot())["step"]))
    assert seen == [11, 12, 12, 12, 12, 16, 16, 16, 16, 20]  # the first one is measured in any case


def test_a_step_that_was_called_and_then_lies_in_another_compiled_cell_is_read_anew(mode):
    step = upgrade(plain(*parts()), StepOptions(activations=None))
    step(*batch(0))
    first = step.snapshot()
    assert step.snapshot() is first
    around = InAnotherCell(step)
    for i in (1, 2):
        around(*batch(i))
        assert step.schema.unpack(step.snapshot())["step"] == i + 1
    assert step.schema.unpack(first)["step"] == 1


def test_another_step_can_take_the_network_after_taps_are_removed():
    network, optimizer = parts()
    upgrade(plain(network, optimizer), StepOptions(activations="leaves"))
    remove_taps(network)
    gc.collect()
    InstrumentedStep(network, optimizer, activations="leaves").remove_taps()


def test_evaluation_of_an_upgraded_network_is_unchanged(mode):
    network, optimizer = parts()
    before = network(*batch(0)).asnumpy().copy()
    step = upgrade(plain(network, optimizer), StepOptions(activations="leaves"))
    assert np.array_equal(network(*batch(0)).asnumpy(), before)
    step(*batch(0))
    assert network(*batch(0)).asnumpy() < before  # learned


def test_the_step_is_found_in_what_is_around_it():
    step = plain(*parts())
    outer = nn.SequentialCell(step)
    assert find_step(step) is step and find_step(outer) is step
    assert find_step(step.network) is None and find_step(None) is None


def test_a_network_that_another_step_measures_is_refused():
    network, optimizer = parts()
    first = upgrade(plain(network, optimizer), StepOptions(activations="leaves"))
    with pytest.raises(CannotUpgrade, match="already measured by another"):
        upgrade(plain(network, optimizer), StepOptions(activations="leaves"))
    first.remove_taps()


class Own(nn.TrainOneStepCell):
    pass


def test_a_step_of_an_unknown_class_is_refused_and_unchanged():
    step = Own(*parts())
    with pytest.raises(CannotUpgrade, match="Own; it is known how to measure in TrainOneStepCell"):
        upgrade(step)
    assert type(step) is Own


def test_no_step_at_all_is_refused():
    with pytest.raises(CannotUpgrade, match="NoneType"):
        upgrade(None)


@pytest.mark.compiles
def test_a_compiled_step_is_refused_and_unchanged():
    step = plain(*parts())
    step(*batch(0))
    with pytest.raises(CannotUpgrade, match="compiled already"):
        upgrade(step)
    assert type(step) is nn.TrainOneStepCell
    step(*batch(1))


def test_an_upgraded_step_is_refused():
    with pytest.raises(CannotUpgrade, match="upgraded already"):
        upgrade(upgrade(plain(*parts()), StepOptions(activations=None)))


@pytest.mark.parametrize("options, message", [
    ({"every": 0}, "`every` must be"), ({"window": 0}, "`window` must be"),
    ({"activations": ["nothing like it"]}, "Near names"),
    ({"histograms": [Histogram("weight", "weight", 3)], "every": 2}, "no multiple"), ({"activation_stats": ["rmx"]}, "rmx")])
def test_an_option_that_cannot_work_is_an_error_and_leaves_the_step(options, message):
    step = plain(*parts())
    with pytest.raises(ValueError, match=message) as caught:
        upgrade(step, StepOptions(**options))
    assert not isinstance(caught.value, CannotUpgrade)
    assert type(step) is nn.TrainOneStepCell and "grad" in vars(step)


def test_moments_of_an_optimizer_without_any_are_an_error():
    with pytest.raises(ValueError, match="needs an optimizer that keeps moments"):
        upgrade(plain(*parts(nn.SGD)), StepOptions(moments=True))


def test_an_optimizer_that_divides_by_a_loss_scale_is_refused():
    network, _ = parts()
    with pytest.raises(CannotUpgrade, match="divides gradients by a loss_scale of its own"):
        upgrade(plain(network, nn.Momentum(network.trainable_params(), 0.1, 0.9, loss_scale=8.0)))
