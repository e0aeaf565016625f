"""A few steps of a small network with each option, held against NumPy: what `instrument doctor` runs on the user's device.

    python -m instrument.trials graph|pynative [Ascend|GPU|CPU]

prints one JSON object a line, which `doctor.trials` reads. The twin is written in float64 and shares nothing with the package.
"""
from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from instrument import AttentionProbe, Histogram, InstrumentedStep, NormStats, TrainingMonitor, _compat, read
from instrument.doctor_report import TOLERANCE
from instrument.taps import ALL_STATS

RATE, MOMENTUM, SCALE, MAX_NORM, STEPS = 0.1, 0.9, 1024.0, 0.05, 3
SIZES, WIDTH = (6, 16, 4), 8
RELU = "_backbone.1"
_ALL_HISTOGRAMS = [Histogram("weight", "weight"), Histogram("activation", r"\.1$")]
# What a step is made with to try an option.
OPTIONS: dict[str, dict[str, Any]] = {
    "norms": {},
    "activations": {"activations": "leaves"},
    "activation_stats": {"activations": "leaves", "activation_stats": ALL_STATS},
    "activation_gradients": {"activations": "leaves", "activation_gradients": True},
    "counts": {"activations": "leaves", "counts": True},
    "updates": {"updates": True},
    "moments": {"moments": True},
    "window": {"window": STEPS},
    "spike_window": {"spike_window": 8},
    "skip_spikes": {"spike_window": 8, "skip_spikes": 100.0},
    "histograms": {"histograms": _ALL_HISTOGRAMS},
    "loss_scale": {"loss_scale": SCALE},
    "max_grad_norm": {"max_grad_norm": MAX_NORM},
    "accumulate": {"accumulate": 2},
    "loss_key": {"loss_key": "mse"},
    "per_parameter": {"per_parameter": False},
    "every": {"activations": "blocks", "every": 2},
}
# Options that one step is compiled with; each is tried by itself where it does not work with the others.
TOGETHER = (("norms",), ("activations", "activation_stats", "activation_gradients", "counts"),
            ("updates", "moments", "window", "spike_window", "skip_spikes", "histograms"),
            ("loss_scale", "max_grad_norm", "accumulate", "loss_key", "per_parameter"), ("every",))
# What takes a job of several processes.
NOT_TRIED = ("scope", "ranks", "allow_unverified")


class Twin:
    """The network, its gradients and the optimizer in float64."""

    def __init__(self, weights: list[np.ndarray], x: np.ndarray, target: np.ndarray):
        self.weights = [weight.astype(np.float64) for weight in weights]
        self.moments: list[np.ndarray] = [np.zeros_like(weight) for weight in self.weights]
        self.x, self.target = x.astype(np.float64), target.astype(np.float64)
        self.step_count = 0

    def step(self, max_norm: float = math.inf) -> dict[str, float]:
        """Make one update; returns what a step that measured it must say."""
        first, first_bias, second, second_bias = self.weights
        hidden = self.x @ first.T + first_bias
        active = np.maximum(hidden, 0)
        output = active @ second.T + second_bias
        self.loss = float(np.mean((output - self.target) ** 2))
        d_output = 2 * (output - self.target) / output.size
        d_active = d_output @ second
        d_hidden = d_active * (hidden > 0)
        gradients = [d_hidden.T @ self.x, d_hidden.sum(0), d_output.T @ active, d_output.sum(0)]
        values = {"step": self.step_count + 1, "loss": self.loss, "grad/norm": norm(gradients),
                  "weight/norm": norm(self.weights), "grad/nonfinite": 0,
                  "grad/zero_fraction": share_of_zeros(gradients), "loss_scale": SCALE, "overflow": 0, "skipped": 0,
                  "loss/twice": 2 * self.loss}
        values["grad/norm_clipped"] = min(values["grad/norm"], max_norm)
        for name, gradient, weight in zip(("0.weight", "0.bias", "2.weight", "2.bias"), gradients, self.weights):
            values[f"grad/norm/{name}"], values[f"weight/norm/{name}"] = norm([gradient]), norm([weight])
        values.update(statistics(f"activation/{{}}/{RELU}", active), **statistics(f"activation_grad/{{}}/{RELU}", d_active),
                      **statistics("activation/{}/_backbone.2", output))
        values["moment1/norm"] = norm(self.moments)
        if self.step_count:
            values["moment1/cosine"] = (sum(float(np.vdot(m, g)) for m, g in zip(self.moments, gradients))
                                        / (norm(self.moments) * norm(gradients)))
        clipped = [gradient * (max_norm / max(values["grad/norm"], max_norm) if max_norm < math.inf else 1)
                   for gradient in gradients]
        self.moments = [MOMENTUM * moment + gradient for moment, gradient in zip(self.moments, clipped)]
        values["update/norm"] = RATE * norm(self.moments)
        values["update/ratio"] = values["update/norm"] / values["weight/norm"]
        self.weights = [weight - RATE * moment for weight, moment in zip(self.weights, self.moments)]
        self.step_count += 1
        return values


def norm(arrays: list[np.ndarray]) -> float:
    return math.sqrt(sum(float(np.vdot(array, array)) for array in arrays))


def share_of_zeros(arrays: list[np.ndarray]) -> float:
    return sum(int((array == 0).sum()) for array in arrays) / sum(array.size for array in arrays)


def statistics(name: str, array: np.ndarray) -> dict[str, float]:
    """Those of one cell; `name` has a place for the statistic."""
    numbers = {"count": 1, "mean": array.mean(), "rms": norm([array]) / math.sqrt(array.size), "absmax": np.abs(array).max(),
               "nonfinite": 0, "nonfinite_elements": 0, "zero_fraction": share_of_zeros([array])}
    return {name.format(statistic): float(number) for statistic, number in numbers.items()}


class Losses(nn.Cell):
    """As `nn.WithLossCell`, with two losses."""

    def __init__(self, net: nn.Cell):
        super().__init__(auto_prefix=False)
        self._backbone, self.loss_fn = net, nn.MSELoss()

    def construct(self, x, target):
        loss = self.loss_fn(self._backbone(x), target)
        return {"twice": loss * 2.0, "mse": loss}


class Task:
    """One network, one batch and its twin. Args: several: whether the network returns several losses."""

    def __init__(self, several: bool = False) -> None:
        random = np.random.default_rng(7)
        inputs, hidden, outputs = SIZES
        weights = [random.normal(size=shape).astype(np.float32) / 2
                   for shape in ((hidden, inputs), (hidden,), (outputs, hidden), (outputs,))]
        x, target = (random.normal(size=(8, size)).astype(np.float32) for size in (inputs, outputs))
        self.net = nn.SequentialCell(nn.Dense(inputs, hidden), nn.ReLU(), nn.Dense(hidden, outputs))
        for parameter, weight in zip(self.net.trainable_params(), weights):
            parameter.set_data(Tensor(weight))
        self.network = Losses(self.net) if several else nn.WithLossCell(self.net, nn.MSELoss())
        self.optimizer = nn.Momentum(self.net.trainable_params(), RATE, MOMENTUM)
        self.arrays, self.twin = (x, target), Twin(weights, x, target)
        self.batch = [Tensor(array) for array in self.arrays]


def error_of(values: dict[str, float], true: dict[str, float]) -> float:
    """Largest error of those that both have, relative, or absolute below 1e-3 for numbers that may be zero."""
    errors = [abs(value - true[name]) / max(abs(true[name]), 1e-3) for name, value in values.items() if name in true]
    assert len(errors) >= 4, f"too few numbers to compare: {sorted(values)}"
    return max(math.inf if math.isnan(error) else error for error in errors)


def try_step(options: dict[str, Any]) -> float:
    """The largest error over three updates."""
    task = Task("loss_key" in options)
    step = InstrumentedStep(task.network, task.optimizer, **{"activations": None, **options}).set_train()
    max_norm, worst = options.get("max_grad_norm") or math.inf, 0.0
    parts = options.get("accumulate", 1)
    for number in range(1, STEPS + 1):
        for rows in np.split(np.arange(8), parts):  # micro-batches of one size: the twin has the mean of their gradients
            _, stats = step(*(Tensor(array[rows]) for array in task.arrays))
        true = task.twin.step(max_norm)
        if number == 1 or number % options.get("every", 1) == 0:
            worst = max(worst, error_of(step.schema.unpack(stats), true))
            for name, counts in step.schema.histograms(stats).items():
                sizes = [8 * SIZES[1]] if "activation" in name else [weight.size for weight in task.twin.weights[::2]]
                assert int(counts.sum()) in sizes, f"{name} counts {int(counts.sum())} elements"
    if "window" in options:
        rows, overwritten = step.read_window()
        assert len(rows) == STEPS and not overwritten, f"{len(rows)} rows, {overwritten} overwritten"
    return worst


def try_attention() -> float:
    """MindSpore's attention, and a probe on what it returns."""
    random = np.random.default_rng(7)
    network = Attention()
    x = random.normal(size=(2, 5, WIDTH)).astype(np.float32)
    step = InstrumentedStep(network, nn.Momentum(network.trainable_params(), RATE, MOMENTUM), activations=None).set_train()
    worst = 0.0
    for number in range(1, STEPS + 1):
        weights = {name: parameter.asnumpy().astype(np.float64)
                   for parameter in network.get_parameters() for name in [parameter.name.rpartition(".")[2]]
                   if parameter.name.startswith(("layer.in_proj", "shift"))}
        _, stats = step(Tensor(x))
        values = step.schema.unpack(stats)
        query, key, _ = np.split(x @ weights["in_proj_weight"].T + weights["in_proj_bias"], 3, -1)
        scores = np.matmul(*(each.reshape(2, 5, 2, WIDTH // 2).transpose(order)
                             for each, order in ((query, (0, 2, 1, 3)), (key, (0, 2, 3, 1))))) / math.sqrt(WIDTH // 2)
        true = {"step": number, "attention/count/layer": 1, "attention/count/probe": 1, **attention("layer", scores),
                **attention("probe", x + weights["shift"])}
        worst = max(worst, error_of(values, true))
    return worst


def attention(name: str, scores: np.ndarray) -> dict[str, float]:
    """Largest score, and mean entropy of the softmax over the last axis."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return {f"attention/max_logit/{name}": float(scores.max()),
            f"attention/entropy/{name}": float(-(weights * np.log(weights)).sum(-1).mean())}


class Attention(nn.Cell):
    """Returns a loss of what attention makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.probe, self.mean = AttentionProbe(), ops.ReduceMean()
        # 2.0.0 in PyNative mode differentiates only what comes from a Parameter.
        self.shift = Parameter(Tensor(np.zeros(WIDTH), ms.float32), name="shift")

    def construct(self, x):
        return self.mean(self.layer(x, x, x)[0]) + self.mean(self.probe(x + self.shift))


def try_loop() -> float:
    """`NormStats` in a loop of one's own."""
    task = Task()
    gradients_of = ms.value_and_grad(task.network, None, task.optimizer.parameters)
    norm_stats, worst = NormStats(task.optimizer.parameters), 0.0
    for _ in range(STEPS):
        _, gradients = gradients_of(*task.batch)
        values = norm_stats.schema.unpack(norm_stats(gradients))
        task.optimizer(gradients)
        worst = max(worst, error_of(values, task.twin.step()))
    return worst


def try_monitor() -> float:
    """`TrainingMonitor` on the stock step, in `Model.train`, and read back."""
    from mindspore.dataset import NumpySlicesDataset
    from mindspore.train import Model

    task = Task()
    dataset = NumpySlicesDataset(tuple(np.concatenate([array] * STEPS) for array in task.arrays), shuffle=False)
    with tempfile.TemporaryDirectory() as directory:
        monitor = TrainingMonitor(directory)
        Model(nn.TrainOneStepCell(task.network, task.optimizer)).train(1, dataset.batch(8), callbacks=[monitor],
                                                                      dataset_sink_mode=False)
        assert monitor.run_dir is not None
        run = read(monitor.run_dir)
        true = [task.twin.step() for _ in range(STEPS)]
        assert len(run["loss"].value) == STEPS, f"{len(run['loss'].value)} records of {STEPS} steps"
        each_step = {name: series.value for name, series in run.items() if len(series.value) == STEPS}
        return max(error_of({name: float(value[i]) for name, value in each_step.items()}, true[i]) for i in range(STEPS))


def run() -> Iterator[dict[str, Any]]:
    """One result after the other; a trial that fails does not keep the next from being made."""
    for names in TOGETHER:
        joint = attempted(lambda names=names: try_step({key: value for name in names  # type: ignore[misc]
                                                        for key, value in OPTIONS[name].items()}))
        if len(names) == 1 or joint.get("error", math.inf) <= TOLERANCE:
            yield from ({"option": name, **joint} for name in names)
        else:
            for name in names:
                yield {"option": name, **attempted(lambda name=name: try_step(OPTIONS[name]))}  # type: ignore[misc]
            yield {"option": ", ".join(names), **joint}
    for name, attempt in {"attention": try_attention, "TrainingMonitor": try_monitor, "NormStats": try_loop}.items():
        yield {"option": name, **attempted(attempt)}


def attempted(attempt: Callable[[], float]) -> dict[str, Any]:
    """`{"error": the largest}`, or `{"failed": what went wrong}`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"error": attempt()}
    except Exception as error:  # whatever it is, it is the answer
        text = str(error).strip().splitlines() or [""]
        return {"failed": f"{type(error).__name__}: {text[0]}"}


def main(mode: str, device: str | None = None) -> None:
    """Print the results of one mode."""
    target = {} if device is None else {"device_target": device}
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE, **target)
    for said in itertools.chain([{"mindspore": ms.__version__, "device": _compat.device_target()}], run(), [{"end": True}]):
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
