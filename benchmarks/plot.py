"""The pictures of `alternatives.py` and `scaling.py` in results/, which README.md of this folder shows.

    pip install matplotlib
    python benchmarks/plot.py
"""
from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

RESULTS = Path(__file__).parent / "results"
OURS, OTHERS, INK = "#2f6fb7", "#b9c1cc", "#20262e"


def alternatives() -> None:
    result = json.loads((RESULTS / "alternatives.json").read_text("utf-8"))
    rows = result["graph"][::-1]
    names = [row["way"].replace("ours", "InstrumentedStep") for row in rows]
    colours = [OURS if row["way"].startswith("ours") else OTHERS for row in rows]
    figure, (time, copied) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(4, 2), layout="constrained")
    more = [100 * (row["ratio"] - 1) for row in rows]
    bars = time.barh(names, [max(each, 0) for each in more], color=colours)
    for bar, row, each in zip(bars, rows, more):
        wrong = "" if not row["error"] or row["error"] < 1e-3 else f", its norm off by {100 * row['error']:.0f} %"
        time.annotate(f" {each:+.0f} %{wrong}", (bar.get_width(), bar.get_y() + bar.get_height() / 2), va="center")
    time.set_xlim(0, 1.25 * max(more))
    time.set_xlabel("longer step, %, on a CPU, where a copy costs nothing")
    bars = copied.barh(names, [max(row["copied"], 1) for row in rows], color=colours)
    copied.set_xscale("log")
    copied.set_xlim(100, 1e10)
    for bar, row in zip(bars, rows):
        size = row["copied"]
        said = f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size:,} bytes" if size else "nothing"
        copied.annotate(f" {said}", (max(bar.get_width(), 100), bar.get_y() + bar.get_height() / 2), va="center")
    copied.set_xlabel("from device to host, each step")
    copied.set_yticklabels([])
    for axes in (time, copied):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    figure.suptitle(f"GPT of 5 M parameters; {result['machine']}", x=0.01, ha="left", fontsize=10)
    figure.savefig(RESULTS / "alternatives.png", dpi=120)


def scaling() -> None:
    """What is added to the stock step's time and compile, over the number of layers."""
    result = json.loads((RESULTS / "scaling.json").read_text("utf-8"))
    layers, options = result["layers"], dict(result["options"])
    compile_plain = options.pop("the plain step")["compile_s"]
    figure, (time, compiled) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for (name, row), colour in zip(options.items(), (OURS, "#3a8f6b", "#b5652b")):
        added = [own - plain for own, plain in zip(row["compile_s"], compile_plain)]
        for axes, costs in ((time, row["step_ms"]), (compiled, added)):
            axes.plot(layers, costs, "o", color=colour, label=name)
            axes.plot(layers, np.polyval(np.polyfit(layers, costs, 1), layers), color=colour, linewidth=1)
    for axes, label in ((time, "added to a step, ms"), (compiled, "added to the first call, s of processors")):
        axes.set_xlabel("Dense layers (4,160 parameters each)")
        axes.set_ylabel(label)
        axes.set_xlim(0)
        axes.set_ylim(0)
        axes.spines[["top", "right"]].set_visible(False)
    time.legend(frameon=False)
    figure.suptitle(f"Points: measured; lines: least squares. {result['machine']}", x=0.01, ha="left", fontsize=10)
    figure.savefig(RESULTS / "scaling.png", dpi=120)


def main() -> None:
    plt.rcParams.update({"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK})
    alternatives()
    scaling()


if __name__ == "__main__":
    main()
