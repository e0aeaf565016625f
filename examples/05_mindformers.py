"""MindSpore Transformers: a small LLaMA learns Python's characters on a CPU, recorded by one block of YAML.

Run it with MindFormers 1.9.0 and MindSpore 2.9.0 (`pip install mindformers==1.9.0 mindspore==2.9.0`), from any directory:

    python 05_mindformers.py

It takes about two minutes. The settings are in 05_mindformers.yaml; what is here is the data, and the one thing that YAML
cannot hold: a function that writes text samples. A run of your own needs neither.
"""
from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import mindspore as ms
import numpy as np
from mindformers import MindFormerConfig, Trainer, build_context
from mindspore.mindrecord import FileWriter

from instrument.mindformers import InstrumentMonitor
from instrument.samples import TextSampler

LENGTH, VOCABULARY = 64, 128  # as in the YAML


def write_data(path: str, samples: int) -> None:
    """Python's own source as characters: `samples` rows of LENGTH + 1."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(file.read_text("utf-8", "replace") for file in sorted(library.glob("[a-d]*.py")))
    codes = np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32)
    rows = codes[:samples * (LENGTH + 1)].reshape(samples, LENGTH + 1)
    writer = FileWriter(path, shard_num=1, overwrite=True)
    writer.add_schema({"input_ids": {"type": "int32", "shape": [-1]}}, "characters")
    writer.write_raw_data([{"input_ids": row} for row in rows])
    writer.commit()


def write_text(network, prompt: str, length: int = 40) -> str:
    """What the network thinks comes next, character by character, the likeliest each time."""
    codes = [ord(letter) for letter in prompt]
    network.set_train(False)
    try:
        for _ in range(length):
            seen = codes[-LENGTH:]
            row = np.zeros((1, LENGTH), np.int32)
            row[0, :len(seen)] = seen
            logits = network(ms.Tensor(row))
            logits = logits[0] if isinstance(logits, tuple) else logits
            codes.append(int(logits.asnumpy().reshape(-1, VOCABULARY)[len(seen) - 1].argmax()))
    finally:
        network.set_train(True)
    return "".join(map(chr, codes))


def main(steps: int, run_dir: str | None = None) -> InstrumentMonitor:
    """Train; returns the callback."""
    config = MindFormerConfig(str(Path(__file__).with_suffix(".yaml")))
    write_data(config.train_dataset.data_loader.dataset_dir, steps * config.runner_config.batch_size)
    [settings] = [each for each in config.callbacks if each["type"] == "InstrumentMonitor"]
    config.callbacks = [each for each in config.callbacks if each is not settings]
    settings = {name: value for name, value in settings.items() if name != "type"}
    if run_dir is not None:
        settings["run_dir"] = run_dir
    sampler = TextSampler(lambda prompt: write_text(monitor.step.observed_network(), prompt), ["def "], every=100)
    monitor = InstrumentMonitor(**settings, text_samples=sampler)
    build_context(config)
    Trainer(args=config, callbacks=[monitor]).train()
    return monitor


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    run = main(parser.parse_args().steps).run_dir
    print(f"The records are in {run}. To look at them: tensorboard --logdir {run}")
