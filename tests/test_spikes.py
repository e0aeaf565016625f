"""The spike score against a twin that keeps the history in a list, and what a spike, a NaN and an overflow leave of it."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from instrument import Histogram, InstrumentedStep


class Net(nn.Cell):
    """loss = w * x: its gradient is x, so the host chooses loss and norm alike."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor([1.0], ms.float32), name="w")

    def construct(self, x):
        return (self.w * x).sum()


class Twin:
    def __init__(self, window):
        self.window, self.good = window, []

    def score(self, loss, norm):
        rows = np.array(self.good[-self.window:], np.float64)
        if len(rows) < min(self.window, 10) or not np.isfinite([loss, norm]).all():
            return np.nan
        mean, deviation = rows.mean(0), rows.std(0)
        return np.max((np.array([loss, norm]) - mean) / np.maximum(deviation, 1e-6 * np.abs(mean)))


def make(window=12, **options):
    network = Net()
    optimizer = nn.SGD(network.trainable_params(), 0.001)
    return InstrumentedStep(network, optimizer, activations=None, spike_window=window, **options)


def run(step, xs):
    return [step.schema.unpack(step(Tensor([x], ms.float32))[1]) for x in xs]


def same(a, b):
    return (np.isnan(a) and np.isnan(b)) or a == pytest.approx(b, rel=2e-4, abs=1e-4)  # a difference of near float32 numbers


def test_the_score_is_read_before_its_step_is_remembered(mode):
    """A condition elsewhere in the graph changes the order in which the runtime comes to what nothing else orders."""
    step, twin = make(2, loss_scale=8.0, histograms=[Histogram("gradient", "w", every=100)]), Twin(2)
    for values in run(step, [1.0, 3.0, 4.0, 9.0, 2.0]):
        loss, norm = values["loss"], values["grad/norm"]
        assert same(values["spike/score"], twin.score(loss, norm))
        twin.good.append((loss, norm))


@pytest.mark.parametrize("window", [4, 12])
def test_the_score_is_that_of_the_twin(mode, window):
    random = np.random.default_rng(0)
    step, twin = make(window), Twin(window)
    xs = list(1 + 0.1 * random.normal(size=22))
    xs[14], xs[18] = np.nan, 3.0
    for x, row in zip(xs, run(step, xs)):
        if np.isnan(x):  # the weight would be NaN for ever
            assert np.isnan(row["spike/score"])
            step.network.w.set_data(Tensor([1.0], ms.float32))
            continue
        assert same(row["spike/score"], twin.score(row["loss"], row["grad/norm"]))
        twin.good.append((row["loss"], row["grad/norm"]))


def test_nan_and_overflow_and_skipped_steps_never_enter(mode):
    step, twin = make(loss_scale=4.0, skip_spikes=6.0, max_grad_norm=0.5), Twin(12)
    xs = [1 + 0.1 * np.sin(i) for i in range(20)]
    xs[12], xs[15], xs[18] = 50.0, np.nan, np.inf
    weights = []
    for i, x in enumerate(xs):
        before = float(step.network.w.asnumpy()[0])
        (row,) = run(step, [x])
        expected = twin.score(row["loss"], row["grad/norm"])
        assert same(row["spike/score"], expected)
        bad = i in (12, 15, 18)
        assert row["skipped"] == bad and row["overflow"] == (i in (15, 18))
        assert (float(step.network.w.asnumpy()[0]) == before) == bad
        if not bad:
            twin.good.append((row["loss"], row["grad/norm"]))
        weights.append(before)
    history = step.spike_history.asnumpy()
    assert history[0, 0] == len(twin.good) == 17
    assert np.isfinite(history).all()
    ring = {tuple(row) for row in history[1:].tolist()}
    assert ring == {(np.float32(a), np.float32(b)) for a, b in twin.good[-12:]}


def test_without_loss_scale_a_spike_is_skipped_as_well(mode):
    step = make(10, skip_spikes=6.0)
    rows = run(step, [1 + 0.01 * (i % 3) for i in range(10)] + [9.0, 1.0])
    assert [row["skipped"] for row in rows] == [0] * 10 + [1, 0]
    assert "overflow" not in rows[0] and rows[10]["spike/score"] > 6


def test_a_constant_loss_scores_zero_and_not_nan(mode):
    network = Net()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=None, spike_window=4)
    rows = run(step, [1.0] * 6)
    assert [row["spike/score"] for row in rows[4:]] == [0, 0]


def test_the_history_survives_a_checkpoint(tmp_path):
    xs = [1 + 0.1 * np.sin(i) for i in range(16)]
    whole = run(make(), xs)
    first = make()
    run(first, xs[:12])
    ms.save_checkpoint(first, str(tmp_path / "a.ckpt"))
    saved = ms.load_checkpoint(str(tmp_path / "a.ckpt"))
    assert "spike_history" in saved
    second = make()
    ms.load_param_into_net(second, saved)
    rows = run(second, xs[12:])
    assert [row["spike/score"] for row in rows] == [row["spike/score"] for row in whole[12:]]
    third = make()
    ms.load_param_into_net(third, {name: value for name, value in saved.items() if name != "spike_history"})
    assert np.isnan(run(third, xs[12:13])[0]["spike/score"])
    assert "spike_history" not in {p.name for p in second.trainable_params()}


@pytest.mark.parametrize("options, message", [
    ({"spike_window": 1}, "`spike_window` must be"), ({"spike_window": True}, "`spike_window` must be"),
    ({"skip_spikes": 3.0}, "say how many by `spike_window`"),
    ({"spike_window": 4, "skip_spikes": -1}, "`skip_spikes` must be"),
    ({"spike_window": 4, "skip_spikes": 3.0, "every": 2}, "Use every=1 with it"), ({"window": 0}, "`window` must be")])
def test_refused(options, message):
    network = Net()
    with pytest.raises(ValueError, match=message):
        InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1), **options)
