"""Every primitive in the compiled graph of a step with everything on, and the platforms that MindSpore documents for it.

    python benchmarks/operators.py > benchmarks/results/operators.md

The graphs are those of tests/test_operators.py, which fails where one is not documented for Ascend, GPU and CPU.
"""
from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(sys.path[0], "tests"))

import mindspore as ms

import test_operators as graphs

ORDER = ("Ascend", "GPU", "CPU")


def main() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    with tempfile.TemporaryDirectory() as directory:
        stock = graphs.of_the_stock_step(Path(directory, "stock"))
        found = {which: graphs.of_everything(which, Path(directory, str(i))) for i, which in enumerate(graphs.EVERYTHING)}
    print(f"Primitives of a step with everything on (MindSpore {ms.__version__}), where it believes itself on a CPU, on "
          "Ascend, and\nin another compiled cell: how many more there are than in the stock step, and the platforms that are "
          "documented.\n")
    print("| primitive | CPU | Ascend | in another cell | platforms |\n|---|---|---|---|---|")
    for name in sorted(set().union(*found.values())):
        more = [(operators - stock)[name] for operators in found.values()]
        if not any(more):
            continue
        platforms = graphs.documented_platforms(name)
        said = ", ".join(each for each in ORDER if each in platforms) if platforms else "structure of a graph, not a kernel"
        if name == "TensorMove":
            said = "undocumented; kernels on Ascend, GPU and CPU"
        print(f"| `{name}` | {' | '.join(str(n) for n in more)} | {said} |")
    missing = graphs.not_everywhere(Counter({name: 1 for operators in found.values() for name in operators - stock}))
    print(f"\nNot on every platform: {', '.join(missing) or 'none'}.")
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
