"""Lays out what `mkdocs build -f .ci/site/mkdocs.yml` reads, in .nox/site/docs: the READMEs, pictures, and pages of reference.

A page of reference names public objects; mkdocstrings makes the rest of their docstrings, without importing anything.
"""
from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / ".nox" / "site" / "docs"
REFERENCE = {
    "step": ("The step", ["step.InstrumentedStep", "step.remove_taps", "schema.Schema", "schema.Metric",
                          "nonfinite.FirstNonfinite", "norms.NormStats",
                          "attention.AttentionProbe", "attention.attention_probe", "histograms.Histogram", "bins",
                          "upgrade.StepOptions", "upgrade.upgrade", "upgrade.CannotUpgrade"]),
    "monitor": ("The monitor", ["monitor.TrainingMonitor", "loop.Loop", "samples.TextSampler", "record.Record",
                                "record.Incident"]),
    "writers": ("Writers", ["writers.base.Writer", "writers.jsonl.JsonlWriter", "writers.tensorboard.TensorBoardWriter",
                            "writers.csv.CsvWriter", "writers.console.ConsoleWriter", "writers.prometheus.PrometheusWriter",
                            "writers.summary.SummaryRecordWriter", "writers.weights_and_biases.WandbWriter",
                            "writers.mlflow_tracking.MlflowWriter", "writers.swanlab_runs.SwanLabWriter",
                            "writers.adapt.as_writer"]),
    "alarms": ("Alarms", ["alarms.default_alarms", "alarms.base.Alarm", "alarms.base.AlarmRaised",
                          "alarms.base.Finding", "alarms.base.Verdict", "alarms.base.NOT_JUDGED", "alarms.base.Policy",
                          "alarms.watch.AlarmSet", "alarms.layers.LayerAlarm",
                          "alarms.nonfinite.NonFinite", "alarms.spikes.GradientSpike",
                          "alarms.spikes.LossSpike", "alarms.vanishing.VanishingGradient", "alarms.layers.DeadLayer",
                          "alarms.layers.UpdateRatio", "alarms.layers.HalfSaturation", "alarms.learning_rate.LearningRate",
                          "alarms.throughput.ThroughputDrop", "alarms.throughput.DataStarved",
                          "alarms.ranks.SlowRank", "alarms.overfitting.Overfitting"]),
    "reading": ("Reading back", ["reading.read", "reading.RunData", "reading.Series"]),
    "mindformers": ("MindSpore Transformers", ["mindformers.monitor.InstrumentMonitor", "mindformers.steps",
                                               "mindformers.pipeline.MFInstrumentedPipelineStep",
                                               "mindformers.REGISTER_PATH"]),
    "bench": ("Measuring costs", ["bench.costs", "bench.Cost"]),
}


def main() -> None:
    shutil.rmtree(DOCS, ignore_errors=True)
    (DOCS / "reference").mkdir(parents=True)
    shutil.copytree(ROOT / "benchmarks" / "results", DOCS / "benchmarks" / "results")
    for source, target in (("README.md", "index.md"), ("README.zh-CN.md", "README.zh-CN.md"),
                           ("benchmarks/README.md", "benchmarks/README.md")):
        text = (ROOT / source).read_text("utf-8").replace("](README.md", "](index.md")
        (DOCS / target).write_text(without_links_to_sources(text), "utf-8")
    for name, (title, objects) in REFERENCE.items():
        body = "\n\n".join(f"::: instrument.{each}" for each in objects)
        (DOCS / "reference" / f"{name}.md").write_text(f"# {title}\n\n{body}\n", "utf-8")


def without_links_to_sources(text: str) -> str:
    """Links to files that the site does not have become their text."""
    return re.sub(r"\[([^\]]+)\]\(((?!http)[^)#]+\.(?:py|yml|yaml))\)", r"`\1`", text)


if __name__ == "__main__":
    main()
