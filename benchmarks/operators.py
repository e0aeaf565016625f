"""Every primitive that measuring adds to a compiled graph, and the platforms that MindSpore documents for it.

    python benchmarks/operators.py > benchmarks/results/operators.md

The graphs and the table are those of tests/test_operators.py, which fails where a primitive is not documented for Ascend, GPU
and CPU, or where the table is not that of the graphs.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(sys.path[0], "tests"))

import mindspore as ms

import test_operators as graphs


def main() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    text = graphs.table()
    print(text, end="")
    sys.exit("Not on every platform: none." not in text)


if __name__ == "__main__":
    main()
