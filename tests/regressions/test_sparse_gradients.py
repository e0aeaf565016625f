"""A sparse gradient cannot be measured in a compiled graph: refused by name, not failed somewhere inside."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor, nn, ops

from instrument import InstrumentedStep


class Lookup(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingLookup(12, 6, target="CPU", sparse=True)
        self.head = nn.Dense(6, 2)

    def construct(self, index):
        return ops.ReduceMean()(ops.square(self.head(self.table(index))))


def test_a_cell_with_a_sparse_gradient_is_refused_by_name():
    network = Lookup()
    with pytest.raises(ValueError, match="'table'.*sparse=True.*nn.Embedding"):
        InstrumentedStep(network, nn.LazyAdam(network.trainable_params(), 0.01))


total = ops.MultitypeFuncGraph("total")


@total.register("Tensor")
def total_of_dense(gradient):
    return ops.ReduceSum()(gradient)


@total.register("RowTensor")
def total_of_sparse(gradient):
    return ops.ReduceSum()(gradient.values)


class StackedTotals(nn.Cell):
    def __init__(self):
        super().__init__()
        self.network = Lookup()
        self.weights = ParameterTuple(self.network.trainable_params())
        self.map = ops.HyperMap()
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, index):
        return ops.Stack()(self.map(total, self.gradient(self.network, self.weights)(index)))


def test_the_reason_stands_the_compiler_gives_no_type_to_what_is_computed_of_a_sparse_gradient():
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    with pytest.raises(TypeError, match="Undetermined"):
        StackedTotals()(Tensor(np.array([1, 4, 4], np.int32)))
