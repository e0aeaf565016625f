import sys
import mindspore
from mindspore import nn
from mindspore.nn import Cell
from mindspore.ops import functional as F
#
#
sys.path.insert(0, '/work/envs/m210/lib/python3.11/site-packages/mindspore/ops/auto_generate')
from mindspore.ops.auto_generate.gen_ops_prim import *
from mindspore.ops.auto_generate.pyboost_inner_prim import *
from mindspore.ops.operations.manually_defined.ops_def import *
from mindspore.ops.auto_generate.gen_ops_def import square_op

def square_opt_1(input):
    square_op_var = square_op(input)
    return square_op_var
#
sys.path.insert(0, '/work/envs/m210/lib/python3.11/site-packages/mindspore/ops/auto_generate')
from mindspore.ops.auto_generate.gen_ops_def import matmul_ext_op

def matmul_ext_opt_1(input, other):
    matmul_ext_op_var = matmul_ext_op(input, other)
    return matmul_ext_op_var
#
sys.path.insert(0, '/work/envs/m210/lib/python3.11/site-packages/mindspore/ops/function')

def matmul_opt_2(input, other):
    matmul_ext_var = matmul_ext_opt_1(input, other)
    return matmul_ext_var
#
sys.path.insert(0, '/work/main/tests')
from test_taps import Linear

class LinearOpt_2(Linear, nn.Cell):

    def __init__(self, obj):
        nn.Cell.__init__(self)
        for key, value in obj.__dict__.items():
            setattr(self, key, value)

    def construct(self, x):
        matmul_var = matmul_opt_2(x, self.w)
        return matmul_var
#
sys.path.insert(0, '/work/main/tests')
from test_taps import Reached

class ReachedOpt_1(Reached, nn.Cell):

    def __init__(self, obj):
        nn.Cell.__init__(self)
        for key, value in obj.__dict__.items():
            setattr(self, key, value)
        self.a = LinearOpt_2(self.a)
        self.b = LinearOpt_2(self.b)

    def construct(self, x):
        compare_var_1 = self.how == 'attribute'
        if compare_var_1:
            a_var = self.a(x)
            b_var = self.b(a_var)
            return b_var
        compare_var = self.how == 'sequential'
        if compare_var:
            layers_var = self.layers(x)
            return layers_var
        self_layers = self.layers
        for layer in self_layers:
            x = layer(x)
        return x
#
sys.path.insert(0, '/work/main/tests')
from mindspore import nn, ops
from test_taps import Loss

class LossOpt_1(Loss, nn.Cell):

    def __init__(self, obj):
        nn.Cell.__init__(self)
        for key, value in obj.__dict__.items():
            setattr(self, key, value)
        self.body = ReachedOpt_1(self.body)

    def construct(self, x):
        body_var = self.body(x)
        square_var = square_opt_1(body_var)
        ReduceMean_var = ops.ReduceMean()
        function_var = ReduceMean_var(square_var)
        return function_var
#