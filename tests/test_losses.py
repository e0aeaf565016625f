"""Networks that return several losses: one is differentiated, the others are reported."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from instrument import InstrumentedStep

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Detector(nn.Cell):
    """Three losses of one weight vector, as a tuple, a list or a dict; logits beside them."""

    def __init__(self, how):
        super().__init__()
        self.w = Parameter(Tensor(np.array([1.0, -2.0, 0.5], np.float32)), name="w")
        self.how = how

    def construct(self, x):
        box = ops.ReduceMean()(x * self.w)
        classes = ops.ReduceMean()(ops.square(self.w))
        total = box + 2 * classes
        logits = x * self.w
        if self.how == "dict":
            return {"total": total, "class": classes, "box": box, "logits": logits, "index": ops.argmax(x, -1)}
        if self.how == "list":
            return [total, classes, box, logits]
        return total, classes, box, logits


def expected(key):
    w = np.array([1.0, -2.0, 0.5])
    box, classes = X.mean(0) / 3 * w, w ** 2 / 3
    gradients = {"box": X.mean(0, dtype=np.float64) / 3, "class": 2 * w / 3}
    gradients["total"] = gradients["box"] + 2 * gradients["class"]
    values = {"box": box.sum(), "class": classes.sum(), "total": box.sum() + 2 * classes.sum()}
    return values, gradients[key]


@pytest.mark.parametrize(("how", "loss_key", "name"), [
    ("tuple", None, "total"), ("tuple", 1, "class"), ("tuple", 2, "box"), ("list", 1, "class"),
    ("dict", None, "total"), ("dict", "class", "class"), ("dict", "box", "box")])
def test_only_the_named_loss_is_differentiated_and_the_others_are_reported(mode, how, loss_key, name):
    network = Detector(how)
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.5), loss_key=loss_key, activations=None)
    before = network.w.asnumpy().copy()
    loss, stats = step(Tensor(X))
    values = step.schema.unpack(stats)
    losses, gradient = expected(name)
    # three float32 operations deep
    assert float(loss.asnumpy()) == pytest.approx(losses[name], rel=1e-6) and values["loss"] == float(loss.asnumpy())
    assert network.w.asnumpy() == pytest.approx(before - 0.5 * gradient, rel=1e-6)
    assert values["grad/norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-6)
    order = ["total", "class", "box"]
    parts = {f"loss/{part if how == 'dict' else order.index(part)}": losses[part] for part in order if part != name}
    assert {key: value for key, value in values.items() if key.startswith("loss/")} == pytest.approx(parts, rel=1e-6)


def test_the_schema_is_there_before_the_first_call_and_complete_after_it(mode):
    network = Detector("dict")
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=None)
    assert "loss" in step.schema and "loss/box" not in step.schema
    stats = step(Tensor(X))[1]
    assert stats.shape == (len(step.schema),) and step.schema.names[1:4] == ("loss", "loss/class", "loss/box")


@pytest.mark.parametrize("scale", [None, 64.0])
def test_parts_are_unscaled_and_averaged_over_accumulated_calls(mode, scale):
    network = Detector("tuple")
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=None, accumulate=2, loss_scale=scale)
    first = step.schema.unpack(step(Tensor(X))[1])
    assert first["step"] == 0 and np.isnan(first["loss/2"])
    values = step.schema.unpack(step(Tensor(3 * X))[1])
    losses, _ = expected("total")
    assert values["loss/2"] == pytest.approx(2 * losses["box"], rel=1e-6)
    assert values["loss/1"] == pytest.approx(losses["class"], rel=1e-6)


class OneElement(nn.Cell):
    """A loss of shape [1], as some loss functions return it."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.ones(3, np.float32)), name="w")

    def construct(self, x):
        return ops.reshape(ops.ReduceMean()(x * self.w), (1,))


def test_a_loss_of_shape_one_is_returned_as_it_is(mode):
    network = OneElement()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=None)
    loss, stats = step(Tensor(X))
    assert loss.shape == (1,) and step.schema.unpack(stats)["loss"] == float(loss.asnumpy()[0])


def test_a_half_precision_loss_is_returned_in_its_type(mode):
    network = OneElement().to_float(ms.float16)
    network.w.set_dtype(ms.float16)
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.0), activations=None)
    loss, stats = step(Tensor(X.astype(np.float16)))
    assert loss.dtype == ms.float16 and stats.dtype == ms.float32
