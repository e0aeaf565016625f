"""No rank waits for another through us but in the graph of a step: read from the source of all modules."""
import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "instrument"
# Cells of the step's graph.
IN_THE_GRAPH = {"joining.py", "shards.py"}
# What asks this process alone.
QUESTIONS = {"get_rank", "get_group_size"}
COLLECTIVES = {"AllGather", "AllGatherV", "AllReduce", "AlltoAll", "AlltoAllV", "Barrier", "BatchISendIRecv", "Broadcast",
               "CollectiveGather", "CollectiveScatter", "NeighborExchange", "NeighborExchangeV2", "Receive", "Reduce",
               "ReduceScatter", "ReduceScatterV", "Send"}


def waits_in(source):
    """Names by which a module could wait for other ranks."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in ("ops", "P", "operations"):
            found |= {node.attr} & COLLECTIVES
        elif isinstance(node, ast.Attribute) and node.attr in ("communication", "comm_func"):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names = {each.name for each in node.names}
            if (node.module or "").startswith("mindspore.communication"):
                found |= names - QUESTIONS
            elif (node.module or "").startswith("mindspore"):
                found |= names & (COLLECTIVES | {"communication", "comm_func"})
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names if each.name.startswith("mindspore.communication")}
    return found


@pytest.mark.parametrize("source", ["from mindspore import ops\nops.AllReduce()", "from mindspore.ops import AllGather as x",
                                    "from mindspore.communication import comm_func",
                                    "import mindspore.communication.comm_func",
                                    "import mindspore as ms\nms.communication.comm_func.barrier()"])
def test_a_collective_would_be_seen(source):
    assert waits_in(source)


def test_only_the_graph_of_a_step_waits_for_other_ranks():
    found = {str(path.relative_to(PACKAGE)): waits_in(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    assert len(found) > 100 and {name: names for name, names in found.items() if names} == dict.fromkeys(
        IN_THE_GRAPH, {"AllReduce"})


def test_it_does_so_by_the_operators_of_a_cell():
    for name in IN_THE_GRAPH:
        tree = ast.parse((PACKAGE / name).read_text("utf-8"))
        used = [function.name for function in ast.walk(tree) if isinstance(function, ast.FunctionDef)
                for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                and node.func.attr == "all_reduce"]
        assert used and set(used) <= {"construct", "joined"}, used
