"""After a step has raised in PyNative mode, MindSpore must not go on recording a gradient."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from instrument import InstrumentedStep


class _Fails(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 1)

    def construct(self, x):
        self.dense(x)
        raise ValueError("no batch like this")


def test_no_gradient_is_left_open(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MindSpore writes what did not compile
    network = _Fails()
    step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1))
    with pytest.raises(ValueError, match="no batch like this"):
        step(Tensor(np.ones((2, 3), np.float32)))
    executor = pytest.importorskip("mindspore.common.api")._pynative_executor
    if not hasattr(executor, "grad_flag"):
        pytest.skip("this release does not tell whether a gradient is being recorded")
    assert not executor.grad_flag()


def test_a_compiled_gradient_works_afterwards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        network = _Fails()
        step = InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1))
        with pytest.raises(ValueError, match="no batch like this"):
            step(Tensor(np.ones((2, 3), np.float32)))
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)
    dense, loss = nn.Dense(3, 2), nn.CrossEntropyLoss()

    def forward(x, y):
        return loss(dense(x), y)

    gradient = ms.value_and_grad(forward, None, dense.trainable_params())

    @ms.jit
    def value_and_gradient(x, y):
        return gradient(x, y)

    value, _ = value_and_gradient(Tensor(np.ones((2, 3), np.float32)), Tensor(np.zeros(2, np.int32)))
    assert np.isfinite(value.asnumpy())
