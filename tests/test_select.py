"""Which cells the argument `activations` chooses."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from instrument.select import can_be_exactly_zero, select_cells


class Attention(nn.Cell):
    def __init__(self):
        super().__init__()
        self.query = nn.Dense(4, 4)
        self.softmax = nn.Softmax()

    def construct(self, x):
        return self.softmax(self.query(x))


class Block(nn.Cell):
    """A transformer block; `experts` holds blocks of its own."""

    def __init__(self, experts=0):
        super().__init__()
        self.norm = nn.LayerNorm((4,))
        self.attention = Attention()
        self.mlp = nn.SequentialCell(nn.Dense(4, 8), nn.GELU(), nn.Dense(8, 4))
        self.experts = nn.CellList([Attention() for _ in range(experts)])

    def construct(self, x):
        return x + self.mlp(self.attention(self.norm(x)))


class Transformer(nn.Cell):
    def __init__(self, depth=2, experts=0):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.position = nn.Embedding(6, 4)
        self.project = nn.Dense(4, 4)
        self.blocks = nn.CellList([Block(experts) for _ in range(depth)])
        self.norm = nn.LayerNorm((4,))
        self.head = nn.Dense(4, 10)

    def construct(self, x):
        x = self.project(self.embedding(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Encoder(nn.Cell):
    """Blocks and a norm, without a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.SequentialCell(Block(), Block())
        self.norm = nn.LayerNorm((4,))

    def construct(self, x):
        return self.norm(self.blocks(x))


class Bottleneck(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.relu = nn.ReLU()

    def construct(self, x):
        return self.relu(self.conv(x)) + x


def stage(depth):
    return nn.SequentialCell(*[Bottleneck() for _ in range(depth)])


class ResNet(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 2, 1)
        self.layer1 = stage(2)
        self.layer2 = stage(1)
        self.fc = nn.Dense(2, 3)

    def construct(self, x):
        return self.fc(self.layer2(self.layer1(self.conv1(x))).mean((2, 3)))


class StagedResNet(nn.Cell):
    def __init__(self):
        super().__init__()
        self.stages = nn.SequentialCell(stage(2), stage(1))

    def construct(self, x):
        return self.stages(x)


class LeNet(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.drop = nn.Dropout()
        self.fc = nn.Dense(8, 2)

    def construct(self, x):
        return self.fc(self.drop(self.flatten(self.pool(self.relu(self.conv(x))))))


class OwnGradient(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones(4, np.float32)))

    def construct(self, x):
        return x * self.weight

    def bprop(self, x, out, dout):
        return (dout,)


class WithOwnGradient(nn.Cell):
    def __init__(self):
        super().__init__()
        self.before = nn.Dense(4, 4)
        self.custom = OwnGradient()

    def construct(self, x):
        return self.custom(self.before(x))


class CalledList(nn.CellList):
    """A CellList with a construct, as some model libraries write it."""

    def construct(self, x):
        for cell in self:
            x = cell(x)
        return x


class Tied(nn.Cell):
    """One cell under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(4, 4)
        self.second = self.first
        self.third = nn.Dense(4, 4)

    def construct(self, x):
        return self.third(self.second(self.first(x)))


def chosen(network, activations):
    """The names, having checked that each is the network's own name of that very cell, in the network's order."""
    pairs = select_cells(network, activations)
    known = [(name, id(cell)) for name, cell in network.cells_and_names()]
    positions = [known.index((name, id(cell))) for name, cell in pairs]
    assert positions == sorted(set(positions))
    return [name for name, _ in pairs]


def sequence(*cells):
    return nn.SequentialCell(list(cells))


BLOCKS = {
    "a transformer's, with embeddings and head, no other layer and no norm":
        (Transformer, ["embedding", "position", "blocks.0", "blocks.1", "head"]),
    "a headless encoder's alone": (Encoder, ["blocks.0", "blocks.1"]),
    "the outermost of nested ones":
        (lambda: Transformer(1, experts=2), ["embedding", "position", "blocks.0", "head"]),
    "a residual network's, and its head": (ResNet, ["layer1.0", "layer1.1", "layer2.0", "fc"]),
    "those of stages within a container": (StagedResNet, ["stages.0.0", "stages.0.1", "stages.1.0"]),
    "behind a loss cell": (lambda: nn.WithLossCell(Transformer(1), nn.MSELoss()),
                           ["_backbone.embedding", "_backbone.position", "_backbone.blocks.0", "_backbone.head"]),
    "layers of one type in a row": (lambda: sequence(sequence(nn.Dense(4, 4), nn.Dense(4, 4)), nn.ReLU()), ["0.0", "0.1"]),
    "leaves where the members differ": (lambda: sequence(nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 4)), ["0", "1", "2"]),
    "leaves where a container has one plain layer": (lambda: sequence(sequence(nn.Dense(4, 4)), nn.ReLU()), ["0.0", "1"]),
    "leaves where like members have no parameter":
        (lambda: sequence(sequence(nn.ReLU(), nn.ReLU()), nn.Dense(4, 4)), ["0.0", "0.1", "1"]),
    "leaves where a container is empty": (lambda: sequence(nn.CellList([]), nn.Dense(4, 4)), ["1"]),
    "leaves where nothing repeats": (LeNet, ["conv", "relu", "fc"]),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_are(case):
    build, expected = BLOCKS[case]
    assert chosen(build(), "blocks") == expected


def test_leaves_are_layers_with_parameters_and_activation_functions():
    assert chosen(LeNet(), "leaves") == ["conv", "relu", "fc"]
    assert chosen(Transformer(1), "leaves") == [
        "embedding", "position", "project", "blocks.0.norm", "blocks.0.attention.query", "blocks.0.attention.softmax",
        "blocks.0.mlp.0", "blocks.0.mlp.1", "blocks.0.mlp.2", "norm", "head"]


def test_none_chooses_nothing():
    assert select_cells(Transformer(), None) == []


@pytest.mark.parametrize("expressions, expected", [
    ([r"^blocks\.\d+$"], ["blocks.0", "blocks.1"]),
    ([r"attention$", "^head$"], ["blocks.0.attention", "blocks.1.attention", "head"]),
    (["^head$", "^norm$"], ["norm", "head"]),  # the network's order, not the expressions'
    ([r"attention", r"query"], ["blocks.0.attention", "blocks.0.attention.query", "blocks.0.attention.softmax",
                                "blocks.1.attention", "blocks.1.attention.query", "blocks.1.attention.softmax"]),
    ((r"1\.mlp\.0",), ["blocks.1.mlp.0"]),
    ([r"^(?!blocks).*on$"], ["position"]),
    (["^head$", "^head$"], ["head"]),
    ([], []),
])
def test_expressions_are_searched_in_the_names_and_each_cell_comes_once(expressions, expected):
    assert chosen(Transformer(), expressions) == expected


@pytest.mark.parametrize("types, expected", [
    (nn.LayerNorm, ["blocks.0.norm", "norm"]),
    ([nn.Embedding, nn.GELU], ["embedding", "position", "blocks.0.mlp.1"]),
    ([Attention, r"query$"], ["blocks.0.attention", "blocks.0.attention.query"]),
])
def test_types_choose_their_instances_and_go_with_expressions(types, expected):
    assert chosen(Transformer(1), types) == expected


def test_a_type_chooses_subclasses_too():
    class MyDense(nn.Dense):
        pass

    assert chosen(sequence(MyDense(2, 2), nn.ReLU()), nn.Dense) == ["0"]


def test_a_callable_is_asked_about_every_cell_but_the_network_itself():
    network = Transformer(1)
    asked = []

    def wide(name, cell):
        asked.append((name, cell))
        return isinstance(cell, nn.Dense) and cell.out_channels > 4

    assert chosen(network, wide) == ["blocks.0.mlp.0", "head"]
    assert [name for name, _ in asked] == [name for name, _ in network.cells_and_names() if name]
    assert all(cell is known for (_, cell), (_, known) in zip(asked, list(network.cells_and_names())[1:]))


def test_an_expression_that_matches_nothing_lists_near_names():
    with pytest.raises(ValueError, match=r"'blocks\.0\.atention' matches no cell.*Near names: blocks\.0\.attention") as caught:
        select_cells(Transformer(), ["^head$", "blocks.0.atention"])
    assert "cells_and_names()" in str(caught.value)


def test_a_type_that_matches_nothing_says_so():
    with pytest.raises(ValueError, match="the type Conv2d matches no cell of the network"):
        select_cells(Transformer(), [nn.Conv2d])


def test_a_malformed_expression_is_named():
    with pytest.raises(ValueError, match=r"`activations` has '\(head', which is not a regular expression: .*unterminated"):
        select_cells(Transformer(), ["(head"])


@pytest.mark.parametrize("wrong", ["block", "^head$", 1, {"^head$"}, {"head": True}, b"blocks"])
def test_other_arguments_are_refused_with_the_list_of_what_goes(wrong):
    with pytest.raises(TypeError, match=r"'blocks', 'leaves', a list of regular expressions.*One expression goes into a list"):
        select_cells(Transformer(), wrong)


@pytest.mark.parametrize("wrong", [[1], [None], ["^head$", int], [nn.ReLU()], int])
def test_a_list_holds_expressions_and_cell_types_only(wrong):
    with pytest.raises(TypeError, match="must hold regular expressions .* and subclasses of nn.Cell"):
        select_cells(Transformer(), wrong)


def test_an_expression_that_finds_a_list_of_cells_as_well_means_the_others():
    network = Transformer()
    assert chosen(network, ["."]) == [name for name, _ in network.cells_and_names()
                                      if name and name != "blocks" and not name.endswith("experts")]
    assert chosen(network, [".*"]) == chosen(network, ["."])


@pytest.mark.parametrize("activations", [["^blocks$"], nn.CellList, lambda name, cell: name == "blocks"])
def test_a_cell_list_is_refused_because_it_is_never_called(activations):
    with pytest.raises(ValueError, match=r"cell 'blocks' \(CellList\) cannot be measured.*its members are.*`activations`"):
        select_cells(Transformer(), activations)


def test_a_cell_list_with_a_construct_of_its_own_can_be_measured():
    assert chosen(sequence(CalledList([nn.Dense(4, 4)]), nn.ReLU()), ["^0$"]) == ["0"]


@pytest.mark.parametrize("activations", [["custom"], OwnGradient, lambda name, cell: name == "custom"])
def test_a_cell_with_its_own_bprop_is_refused_by_name_when_asked_for(activations):
    with pytest.raises(ValueError, match=r"cell 'custom' \(OwnGradient\) cannot be measured: it gives its own bprop"):
        select_cells(WithOwnGradient(), activations)


def test_a_cell_with_its_own_bprop_is_left_out_of_leaves_and_blocks():
    with pytest.warns(UserWarning, match="1 of 2 cells are not measured, 'custom' for example: it gives its own bprop"):
        assert chosen(WithOwnGradient(), "leaves") == ["before"]
    with pytest.warns(UserWarning, match="2 of 3 cells are not measured"):
        assert chosen(sequence(sequence(OwnGradient(), OwnGradient()), nn.Embedding(2, 4)), "blocks") == ["1"]


@pytest.fixture
def recomputed():
    network = Transformer()
    network.blocks[0].recompute()
    return network


def test_recomputed_cells_are_measured_in_graph_mode(recomputed):
    assert chosen(recomputed, "blocks") == ["embedding", "position", "blocks.0", "blocks.1", "head"]
    assert chosen(recomputed, [r"0\.mlp\.0"]) == ["blocks.0.mlp.0"]


@pytest.fixture
def pynative():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.GRAPH_MODE)


def test_recomputed_cells_are_left_out_or_refused_in_pynative_mode(recomputed, pynative):  # 2.0.0: in this order
    with pytest.warns(UserWarning, match="1 of 5 cells are not measured, 'blocks.0' for example: in PyNative mode"):
        assert chosen(recomputed, "blocks") == ["embedding", "position", "blocks.1", "head"]
    for name in ("blocks.0", "blocks.0.mlp.0"):
        with pytest.raises(ValueError, match=f"cell '{name}' .* cannot be measured: in PyNative mode.*graph mode measures it"):
            select_cells(recomputed, [f"^{name}$"])


def test_a_shared_cell_comes_once_under_its_first_name():
    assert chosen(Tied(), "leaves") == ["first", "third"]
    assert chosen(Tied(), nn.Dense) == ["first", "third"]


CELLS = [nn.ReLU(), nn.ReLU6(), nn.HSwish(), nn.HSigmoid(), nn.SoftShrink(), nn.HShrink(), nn.Threshold(0, 0),
         nn.GELU(), nn.SiLU(), nn.ELU(), nn.LeakyReLU(), nn.Sigmoid(), nn.Tanh(), nn.Softmax(), nn.LogSoftmax(),
         nn.Dense(1, 1)]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: type(cell).__name__)
def test_what_can_be_exactly_zero_is_what_sends_an_interval_to_zero(cell, pynative):
    x = np.linspace(-4, 4, 80, dtype=np.float32)  # an even number of points: zero is none of them
    zeros = np.sum(cell(Tensor(x[:, None] if isinstance(cell, nn.Dense) else x)).asnumpy() == 0)
    assert zeros == 0 or zeros > 2  # a single zero is where the function crosses the axis
    assert can_be_exactly_zero(cell) == (zeros > 2)


def test_dropout_and_subclasses_can_be_exactly_zero_and_containers_cannot():
    class MyReLU(nn.ReLU):
        pass

    assert can_be_exactly_zero(nn.Dropout()) and can_be_exactly_zero(MyReLU())
    assert not can_be_exactly_zero(sequence(nn.ReLU()))
