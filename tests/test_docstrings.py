"""The examples in docstrings are run, and what they print is what they say."""
import doctest
import importlib
import pkgutil

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model

import instrument
from instrument import Histogram, InstrumentedStep, NormStats, TrainingMonitor
from instrument.record import Record
from instrument.upgrade import StepOptions
from instrument.writers import JsonlWriter

pytestmark = pytest.mark.compiles


def examples():
    """Each docstring with an example that is run, in modules that can be imported here."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in pkgutil.walk_packages(instrument.__path__, "instrument."):
        if module.name.startswith(("instrument.mindformers", "instrument._quickstart")):
            continue  # MindFormers: tests/mf
        try:
            loaded = importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # tests/dashboard has an environment with these
            assert error.name.split(".")[0] in ("fastapi", "nicegui", "regex", "socketio", "starlette"), error
            continue
        for test in finder.find(loaded, module.name):
            if any(not example.options.get(doctest.SKIP) for example in test.examples):
                yield pytest.param(test, id=test.name.replace("instrument.", "", 1))


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What an example may take for granted: a small network and its batch, and a run in runs/first."""
    monkeypatch.chdir(tmp_path)
    with JsonlWriter("runs/first") as writer:
        for step in (1, 2, 3):
            writer.write(Record(step, 1735387200.0 + step, {"loss": 1 / step, "step_time": 0.1}))
    random = np.random.default_rng(0)
    arrays = random.normal(size=(32, 16)).astype(np.float32), random.integers(2, size=32).astype(np.int32)
    x, y = map(Tensor, arrays)

    def forward(x, y):  # MindSpore compiles from the source, so no lambda
        return loss_fn(net(x), y)

    net, loss_fn = nn.SequentialCell(nn.Dense(16, 64), nn.ReLU(), nn.Dense(64, 2)), nn.CrossEntropyLoss()
    return {"ms": ms, "np": np, "nn": nn, "ops": ops, "Tensor": Tensor, "Model": Model, "instrument": instrument,
            "InstrumentedStep": InstrumentedStep, "NormStats": NormStats, "TrainingMonitor": TrainingMonitor,
            "Histogram": Histogram, "StepOptions": StepOptions, "net": net, "loss_fn": loss_fn, "x": x, "y": y,
            "network": nn.WithLossCell(net, loss_fn), "optimizer": nn.Adam(net.trainable_params(), 1e-3),
            "forward": forward, "dataset": NumpySlicesDataset(arrays).batch(8)}


@pytest.mark.parametrize("example", list(examples()))
def test_an_example_prints_what_it_says(example, names):
    said = []
    example.globs.update({name: value for name, value in names.items() if name not in example.globs})
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert not said, "".join(said)


def test_there_are_examples():
    assert len(list(examples())) >= 30
