"""The ring buffer: every measured step is read once, in order, with its number, or counted as overwritten."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from instrument import InstrumentedStep
from networks import MLP, mlp_batches


class Sink(nn.Cell):
    """Calls the step n times in one graph, as a data sink does, and shows the last vector alone."""

    def __init__(self, step, n):
        super().__init__(auto_prefix=False)
        self.step, self.n = step, n

    def construct(self, xs, ys):
        loss, stats = self.step(xs[0], ys[0])
        for i in range(1, self.n):
            loss, stats = self.step(xs[i], ys[i])
        return loss, stats


def make(**options):
    network = MLP()
    return InstrumentedStep(network, nn.Adam(network.trainable_params(), 1e-2), activations="leaves", **options)


def stacked(batches):
    return [Tensor(np.stack(arrays)) for arrays in zip(*batches)]


@pytest.mark.parametrize("every, expected", [(1, [[1, 2, 3], [4, 5, 6], [7, 8, 9]]), (2, [[1, 2], [4, 6], [8]])])
def test_no_step_of_a_sink_is_lost(mode, every, expected):
    batches = mlp_batches(9)
    reference = make()
    vectors = {i + 1: reference(*map(Tensor, batch))[1].asnumpy().copy() for i, batch in enumerate(batches)}
    step = make(window=3, every=every)
    sink = Sink(step, 3).set_train()
    for i, steps in enumerate(expected):
        sink(*stacked(batches[3 * i:3 * i + 3]))
        rows, overwritten = step.read_window()
        assert rows[:, 0].tolist() == steps and overwritten == 0
        for row in rows:
            assert np.array_equal(row, vectors[int(row[0])])
    assert len(step.read_window().rows) == 0


def test_what_was_overwritten_is_counted(mode):
    step = make(window=4)
    for batch in mlp_batches(3):
        step(*map(Tensor, batch))
    assert step.read_window().overwritten == 0
    for batch in mlp_batches(7):
        step(*map(Tensor, batch))
    rows, overwritten = step.read_window()  # 4 to 10, of which 7 to 10 are there
    assert rows[:, 0].tolist() == [7, 8, 9, 10] and overwritten == 3
    again = step.read_window(after=8)
    assert again.rows[:, 0].tolist() == [9, 10] and again.overwritten == 0
    everything = step.read_window(after=0)
    assert everything.rows[:, 0].tolist() == [7, 8, 9, 10] and everything.overwritten == 6


def test_going_back_to_an_earlier_step_loses_nothing():
    step = make(window=4)
    for batch in mlp_batches(3):
        step(*map(Tensor, batch))
    step.read_window()
    step.set_step(1)
    for batch in mlp_batches(2):
        step(*map(Tensor, batch))
    rows, overwritten = step.read_window()
    assert rows[:, 0].tolist() == [2, 3] and overwritten == 0


def test_after_a_step_there_are_no_steps_that_were_done_again():
    step = make(window=6)
    for batch in mlp_batches(5):
        step(*map(Tensor, batch))
    step.set_step(2)
    kept = []
    for batch in mlp_batches(2):
        kept.append(step(*map(Tensor, batch))[1].asnumpy().copy())  # 1 is overwritten; 2, 3, 4, 5, 3, 4 are there
    rows, overwritten = step.read_window(after=1)
    assert rows[:, 0].tolist() == [2, 3, 4] and np.array_equal(rows[1:], kept) and overwritten == 1
    assert step.read_window(after=3).rows[:, 0].tolist() == [4] and step.read_window(after=3).overwritten == 0
    assert step.read_window(after=4).rows.shape == (0, len(step.schema))
    for wrong in ("3", 1.5, True):
        with pytest.raises(TypeError, match="`after` must be the number of a step, or None, but it is"):
            step.read_window(after=wrong)


def test_a_step_called_by_hand_with_accumulation_and_losses(mode):
    step = make(window=8, accumulate=2, every=2, updates=True)
    for batch in mlp_batches(8):
        _, stats = step(*map(Tensor, batch))
    rows = step.read_window().rows
    assert rows[:, 0].tolist() == [1, 2, 4] and rows.shape[1] == len(step.schema)
    assert np.array_equal(rows[-1], stats.asnumpy())


def test_it_is_in_no_checkpoint(tmp_path):
    step = make(window=4)
    assert not any("instrument" in parameter.name for parameter in step.get_parameters())
    ms.save_checkpoint(step, str(tmp_path / "a.ckpt"))
    assert not any("instrument" in name for name in ms.load_checkpoint(str(tmp_path / "a.ckpt")))


def test_without_a_window_it_says_so():
    with pytest.raises(ValueError, match=r"keeps no window: make it with InstrumentedStep\(..., window=N\)"):
        make().read_window()
