"""Runs as training leaves them, made without training: for the tests and the benchmark of the dashboard.

    python tests/dashboard/runs_made.py DIR        # all that the pictures in the README show

Every number comes from one seed, so that two calls make the same files, times apart.
"""
from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from instrument.bins import BINS, HIGHEST, LOWEST, OCTAVES, ZERO

UNITS = {"loss": "1", "grad/norm": "1", "grad/norm_clipped": "1", "weight/norm": "1", "update/ratio": "1"}


class Made:
    """Writes the files of a run; every call writes whole lines, as the writer of a run does."""

    def __init__(self, directory: Path, *, layers: int = 4, hyper_parameters: dict[str, Any] | None = None, **config: Any):
        self.directory, self.layers = Path(directory), layers
        self.directory.mkdir(parents=True, exist_ok=True)
        names = [*UNITS, *self.per_layer()]
        (self.directory / "config.json").write_bytes(orjson.dumps({
            "start_time": "2026-01-02T03:04:05+00:00", "command": ["python", "train.py"],
            "versions": {"python": "3.11.7", "mindspore": "2.10.0"}, "max_grad_norm": 1.0,
            "hyper_parameters": {"learning_rate": 3e-4, "batch_size": 32, "max_grad_norm": 1.0, **(hyper_parameters or {})},
            "schema": [{"name": name, "unit": UNITS.get(name, "nats" if "entropy" in name else "1"), "scope": "global",
                        "merge": "mean"} for name in names], **config}))
        self.number = 0

    def per_layer(self) -> list[str]:
        return [f"{kind}/blocks.{layer}" for kind in ("activation/rms", "attention/entropy", "attention/max_logit")
                for layer in range(self.layers)] + \
               [f"grad/norm/blocks.{layer}.{part}.weight" for layer in range(self.layers) for part in ("attention", "mlp")]

    def _append(self, name: str, *lines: dict[str, Any]) -> None:
        with open(self.directory / name, "ab") as file:
            file.write(b"".join(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
                                for line in lines))

    def metrics(self, *records: dict[str, Any]) -> None:
        self._append(f"metrics-{self.number:05}.jsonl", *map(with_nonfinite, records))

    def alarm(self, step: int, alarm: str, message: str, *, state: str = "begin", metric: str = "", where: str = "",
              first_step: int | None = None, value: float | None = None, at: float | None = None) -> None:
        line = {"step": step, "time": at or time.time(), "alarm": alarm, "state": state, "first_step": first_step or step,
                "last_step": step, "steps": 1, "message": message, "metric": metric, "value": value, "where": where}
        if value is not None and not math.isfinite(value):
            line.update(value=None, nonfinite={"value": str(value)})
        self._append("alarms.jsonl", line)

    def sample(self, step: int, text: str, *, name: str = "sample", at: float | None = None) -> None:
        self._append("samples.jsonl", {"step": step, "time": at or time.time(), "name": name, "text": text})

    def histograms(self, step: int, counts: dict[str, np.ndarray], *, at: float | None = None) -> None:
        content = {}
        for name, each in counts.items():
            used = np.flatnonzero(each)
            content[name] = {"low": int(used[0]), "counts": each[used[0]:used[-1] + 1]}
        self._append(f"histograms-{self.number:05}.jsonl", {"step": step, "time": at or time.time(), "histograms": content})

    def resumed(self, step: int) -> None:
        mark = {"step": step, "time": time.time(), "resumed": True}
        for path in sorted(self.directory.glob("*.jsonl")):
            self._append(path.name, mark)

    def end(self, status: str = "finished", step: int = 0) -> None:
        (self.directory / "summary.json").write_bytes(orjson.dumps({"status": status, "last_step": step, "errors": {}}))


def began(seconds: float) -> str:
    """So long ago, as `config.json` has it."""
    return datetime.fromtimestamp(time.time() - seconds, timezone.utc).isoformat(timespec="seconds")


def with_nonfinite(record: dict[str, Any]) -> dict[str, Any]:
    """A record as the writer has it: JSON has no NaN."""
    bad = {name: str(float(value)) for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**record, "nonfinite": bad} if bad else record


def counts_of(spread: float, generator: np.random.Generator) -> np.ndarray:
    """A histogram of 4,096 normal numbers of that spread, in the bins of `instrument.bins`."""
    values = generator.normal(0, spread, 4096)
    octaves = np.clip(np.floor(np.log2(np.abs(values))), LOWEST, HIGHEST - 1).astype(int)
    bins = np.where(values > 0, ZERO + 1 + octaves - LOWEST, OCTAVES - 1 - (octaves - LOWEST))
    return np.bincount(bins, minlength=BINS)


def records(steps: range, *, layers: int = 4, seed: int = 0, seconds: float = 0.4, total: int = 1000, rate: float = 3e-4,
            ends: float | None = None, explode: int | None = None) -> Iterator[dict[str, Any]]:
    """Records of training, with those of validation at every fiftieth step.

    Args:
        ends: When the last one was made; now by default.
        explode: From this step on the gradient grows, and forty steps later all is NaN.
    """
    generator = np.random.default_rng(seed)
    ends = time.time() if ends is None else ends
    slow = 0.0
    for step in steps:
        at = ends - (steps[-1] - step) * seconds
        warm = min(step / (0.05 * total), 1.0)
        lr = rate * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * min(step / total, 1))))
        blown = 0.0 if explode is None or step < explode else (step - explode) / 6
        nan = blown * 6 >= 40
        slow = 0.97 * slow + float(generator.normal(0, 0.012))
        loss = 1.15 + 3.3 * math.exp(-step / (0.16 * total)) + 0.8 * math.exp(-step / (0.6 * total)) + slow \
            + float(generator.normal(0, 0.035)) + (math.exp(min(blown, 6)) - 1) * 0.02
        norm = (0.35 + 1.6 * math.exp(-step / (0.1 * total))) * math.exp(float(generator.normal(0, 0.16))) * math.exp(blown)
        if generator.random() < 0.004:
            norm *= 6
        record: dict[str, Any] = {
            "step": step, "time": at, "loss": math.nan if nan else loss, "grad/norm": math.nan if nan else norm,
            "grad/norm_clipped": math.nan if nan else min(norm, 1.0), "weight/norm": math.nan if nan else
            38 + 6 * math.log1p(step / (0.1 * total)), "update/ratio": math.nan if nan else
            1e-3 * lr / rate * math.exp(float(generator.normal(0, 0.05)))}
        for layer in range(layers):
            depth = (layer + 1) / layers
            record[f"activation/rms/blocks.{layer}"] = math.nan if nan and layer >= layers // 2 else \
                (0.7 + 1.4 * depth + 0.8 * depth * math.log1p(step / (0.2 * total))) * math.exp(
                    float(generator.normal(0, 0.03)) + blown * depth * 0.6)
            record[f"attention/entropy/blocks.{layer}"] = 3.9 - 1.6 * depth * (1 - math.exp(-step / (0.3 * total))) \
                + float(generator.normal(0, 0.02))
            record[f"attention/max_logit/blocks.{layer}"] = 2 + 7 * depth * (1 - math.exp(-step / (0.4 * total))) \
                + float(generator.normal(0, 0.15))
            for part in ("attention", "mlp"):
                record[f"grad/norm/blocks.{layer}.{part}.weight"] = math.nan if nan else \
                    norm * (0.2 + 0.5 * (1 - depth)) * math.exp(float(generator.normal(0, 0.2)))
        wait = abs(float(generator.normal(0.02, 0.012)))
        took = seconds * (1 + abs(float(generator.normal(0, 0.04)))) + wait
        record.update({"learning_rate": lr, "step_time": took, "data_wait": wait, "data_wait_fraction": wait / took,
                       "samples_per_second": 32 / took, "tokens_per_second": 32 * 1024 / took, "epoch": 1 + step * 3 // total,
                       "perplexity": math.nan if nan else math.exp(min(loss, 20)),
                       "host/memory": 6.2e9 + 3e8 * math.log1p(step) / 7, 
                       "host/cpu": 0.35 + abs(float(generator.normal(0, 0.05))),
                       "device/memory": 41e9 + (step > 40) * 2.5e9, "device/utilization": 0.93 - wait})
        yield record
        if step % 50 == 0:
            yield {"step": step, "time": at + 0.1, "val/loss": math.nan if nan else loss + 0.08 + 0.15 * step / total,
                   "val/accuracy": 0.2 + 0.5 * (1 - math.exp(-step / (0.4 * total)))}


TEXT = ("The river went on past the mill, and nobody who stood there said a word.",
        "def mean(values):\n    return sum(values) / len(values)",
        "Once the lamp was lit the room grew small again, and the letters larger.")


def healthy(directory: Path, *, steps: int = 600, total: int = 1000, seed: int = 0, layers: int = 8,
            hyper_parameters: dict[str, Any] | None = None, rate: float = 3e-4) -> Made:
    made = Made(directory, layers=layers, total_steps=total, start_time=began(0.4 * steps + 9),
                hyper_parameters={"learning_rate": rate, **(hyper_parameters or {})})
    made.metrics(*records(range(1, steps + 1), layers=layers, total=total, seed=seed, rate=rate))
    generator = np.random.default_rng(seed)
    for step in range(20, steps + 1, 20):
        spread = 2e-3 * math.exp(-step / total)
        made.histograms(step, {f"grad/blocks.{layer}.mlp.weight": counts_of(spread * (1 + layer), generator)
                               for layer in (0, layers - 1)})
    for i, step in enumerate(range(100, steps + 1, 100)):
        made.sample(step, TEXT[i % len(TEXT)])
    return made


def exploding(directory: Path, *, steps: int = 400, layers: int = 8) -> Made:
    made = Made(directory, layers=layers, total_steps=1000, start_time=began(0.4 * steps + 909),
                hyper_parameters={"learning_rate": 3e-3})
    made.metrics(*records(range(1, steps + 1), layers=layers, seed=3, rate=3e-3, explode=steps - 80, ends=time.time() - 900))
    at = steps - 80
    made.alarm(at + 9, "GradientSpike", "grad/norm is 3.2, 6.1 deviations above the mean of the last 100 steps",
               metric="grad/norm", value=3.2)
    made.alarm(at + 20, "GradientSpike", "", state="end", first_step=at + 9, metric="grad/norm")
    made.alarm(at + 40, "NonFinite", f"activation blocks.{layers // 2} is NaN; blocks.{layers // 2 - 1} before it is finite",
               metric="loss", where=f"blocks.{layers // 2}", value=math.nan)
    made.end("failed: FloatingPointError: loss is NaN", steps)
    return made


def resumed(directory: Path) -> Made:
    made = Made(directory, total_steps=400, start_time=began(129))
    lines = list(records(range(1, 301), total=400, seed=5))
    made.metrics(*lines[:200])
    made.number = 1
    made.metrics(*lines[200:])
    made.resumed(250)
    made.metrics(*records(range(251, 401), total=400, seed=6))
    made.end("finished", 400)
    return made


def troubled(directory: Path, *, steps: int = 20_000, layers: int = 24) -> Made:
    """A long run that is half done: it recovered from a spike and from a short stretch of NaN, and now waits for data."""
    made = Made(directory, layers=layers, total_steps=steps * 3 // 2, hyper_parameters={"layers": layers},
                start_time=began(0.5 * steps + 30))
    spike, bad, waits = steps * 37 // 100, steps * 65 // 100, steps * 39 // 40
    deep = [f"activation/rms/blocks.{layer}" for layer in range(layers * 3 // 4, layers)]
    lines = list(records(range(1, steps + 1), layers=layers, total=steps * 3 // 2, seed=11, seconds=0.5))
    for line in lines:
        step = line["step"]
        if spike <= step < spike + 60 and "loss" in line:
            line["loss"] += 2.5 * math.exp((spike - step) / 20)
            line["grad/norm"] *= 1 + 9 * math.exp((spike - step) / 25)
        if bad <= step < bad + 12 and "loss" in line:
            line.update(dict.fromkeys(["loss", "grad/norm", "grad/norm_clipped", "perplexity", *deep], math.nan))
        if step >= waits and "data_wait_fraction" in line:
            line["data_wait_fraction"] += 0.5
            line["tokens_per_second"] *= 0.45
    made.metrics(*lines)
    made.alarm(spike, "GradientSpike", "grad/norm is 5.2, 9.1 deviations above the mean of the last 100 steps",
               metric="grad/norm", value=5.2)
    made.alarm(spike + 52, "GradientSpike", "", state="end", first_step=spike, metric="grad/norm")
    made.alarm(spike + 1, "LossSpike", "loss is 4.9, 14 deviations above the mean of the last 100 steps", metric="loss",
               value=4.9)
    made.alarm(spike + 59, "LossSpike", "", state="end", first_step=spike + 1, metric="loss")
    where = deep[0].rsplit("/")[-1]
    made.alarm(bad, "NonFinite", f"activation {where} is NaN; blocks.{layers * 3 // 4 - 1} before it is finite", metric="loss",
               where=where, value=math.nan)
    made.alarm(bad + 11, "NonFinite", "", state="end", first_step=bad, metric="loss", where=where)
    made.alarm(waits + 20, "DataStarved", "53 % of the time goes into waiting for data, for 20 records",
               metric="data_wait_fraction", value=0.53)
    generator = np.random.default_rng(3)
    for step in range(steps // 100, steps + 1, steps // 100):
        made.histograms(step, {
            "histogram/gradient/blocks.0.mlp.weight": counts_of(2e-3 * math.exp(-step / steps), generator),
            f"histogram/gradient/blocks.{layers - 1}.mlp.weight": counts_of(2e-2 * math.exp(-2 * step / steps), generator)})
    for i, step in enumerate(range(steps // 10, steps + 1, steps // 10)):
        made.sample(step, TEXT[i % len(TEXT)], name=f"prompt {i % 2 + 1}")
    return made


def large(directory: Path, *, steps: int, metrics: int = 50, seed: int = 0) -> None:
    """A long run of one layout, quickly: about 12 microseconds a line and 20 metrics."""
    Made(directory, layers=1, total_steps=steps)
    names = ["loss", "grad/norm", "grad/norm_clipped", "learning_rate", "weight/norm", "update/ratio", "step_time",
             "data_wait", "tokens_per_second", "host/memory"]
    names += [f"activation/rms/blocks.{layer}" for layer in range(metrics - len(names))]
    generator = np.random.default_rng(seed)
    with open(directory / "metrics-00000.jsonl", "ab", buffering=1 << 22) as file:
        for first in range(1, steps + 1, 10_000):
            block = generator.random((min(10_000, steps + 1 - first), metrics), np.float32) * 0.1
            block += (2 + 8 / np.log(first + 10 + np.arange(len(block))))[:, None].astype(np.float32)
            for i, row in enumerate(block.astype(np.float64).tolist()):
                file.write(orjson.dumps({"step": first + i, "time": 1.7e9 + 0.2 * (first + i), **dict(zip(names, row))},
                                        option=orjson.OPT_APPEND_NEWLINE))


def make_all(directory: Path) -> None:
    healthy(directory / "gpt-base")
    healthy(directory / "gpt-small-batch", seed=1, hyper_parameters={"batch_size": 16}, rate=6e-4, steps=480)
    exploding(directory / "gpt-high-rate")
    resumed(directory / "gpt-resumed")
    healthy(directory / "gpt-48-layers", layers=48, steps=300, seed=7)
    troubled(directory / "gpt-24-layers")


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    make_all(Path(sys.argv[1]))
