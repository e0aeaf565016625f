"""Tensors of which each rank holds a shard: what is measured is that of the whole, on real processes and made-up shards."""
import itertools
import pathlib

import numpy as np
import pytest
import shards_rank
from mindspore import Tensor, nn

import reference
from instrument import InstrumentedStep, NormStats, _compat
from instrument.shards import ShardSums
from instrument.upgrade import StepOptions, begin, upgrade
from networks import MLP, mlp_batches
from ranks import job as job_of

HERE = pathlib.Path(__file__).parent
NEAR = 1e-6  # float32 sums of few elements


class Arithmetic(ShardSums):
    """Without an AllReduce, whose place a sum in NumPy takes."""

    def __init__(self, shapes, gradients):
        super().__init__(shapes, gradients, joined=False)
        self.joined = True

    def construct(self, grads, weights):
        return self.held(grads, weights)


class Whole(nn.Cell):
    """What is made of the sum over ranks."""

    def __init__(self, sums):
        super().__init__()
        self.sums = sums

    def construct(self, total):
        return self.sums.whole(total)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_mix_of_sharded_and_replicated_parameters_has_the_squares_of_the_whole(mode, ranks):
    random = np.random.default_rng(ranks)
    shapes = (8, 5), (16,), (2, 4, 3)
    sums = Arithmetic(shapes + shapes, 3)
    whole = Whole(sums)
    possible = [parts for parts in (1, 2, 4, 8) if ranks % parts == 0]
    mixes = list(itertools.product(possible, repeat=3))
    for parts in [mixes[i] for i in random.choice(len(mixes), min(len(mixes), 4), replace=False)]:
        tensors = [random.normal(size=shape) for shape in shapes + shapes]
        held = [[np.split(tensor.ravel(), each)[rank % each].astype(np.float32) for tensor, each in zip(tensors, parts * 2)]
                for rank in range(ranks)]
        total = sum(sums(tuple(map(Tensor, of_rank[:3])), tuple(map(Tensor, of_rank[3:]))).asnumpy() for of_rank in held)
        squares, seen = whole(Tensor(total))
        np.testing.assert_allclose(squares.asnumpy(), [np.sum(tensor ** 2) for tensor in tensors], rtol=NEAR)
        assert (seen.asnumpy() > 0).all()


def test_a_tensor_of_which_parts_are_on_more_ranks_than_others_has_no_norm(mode):
    sums = Arithmetic(((6, 2), (4,), (6, 2), (4,)), 2)
    a, b = np.ones((6, 2), np.float32), np.ones(4, np.float32)
    held = [(a[:4], b), (a[2:], b)]  # rows 2 and 3 twice, the others once; and the other tensor twice
    total = sum(sums(tuple(map(Tensor, each)), tuple(map(Tensor, each))).asnumpy() for each in held)
    squares, _ = Whole(sums)(Tensor(total))
    np.testing.assert_array_equal(squares.asnumpy(), [np.nan, 4, np.nan, 4])


class Job:
    """What the processes of a job told: `rows[name][rank]`, a list of what it told under this name."""

    def __init__(self, mode, ranks, directory):
        self.ranks = ranks
        self.rows, printed = job_of(HERE / "shards_rank.py", ranks, directory, mode)
        wanted = {**{case: [1] * ranks for case in shards_rank.CASES}, "step": [2] * ranks}
        assert {name: list(map(len, rows)) for name, rows in self.rows.items()} == wanted, printed


@pytest.fixture(scope="module", params=[("graph", 2), ("pynative", 2), ("graph", 4)], ids=lambda job: f"{job[0]}-{job[1]}")
def job(request, tmp_path_factory):
    if _compat.RELEASE.release < (2, 7):
        pytest.skip("2.0.0 has no msrun, and refuses PyNative data parallel on a CPU")
    return Job(*request.param, tmp_path_factory.mktemp("shards"))


@pytest.mark.compiles
@pytest.mark.parametrize("case", shards_rank.CASES)
def test_each_rank_has_the_norms_of_whole_tensors(job, case):
    weights, gradients = shards_rank.values(case)
    for ((values, scopes),) in job.rows[case]:
        assert scopes == ["unverified"]
        assert values == pytest.approx(job.rows[case][0][0][0], rel=0, abs=0, nan_ok=True)  # the same on each rank
        for kind, arrays in (("grad", gradients), ("weight", weights)):
            for i, array in enumerate(arrays):
                true = reference.norm(array.astype(np.float64))
                if case == "tiny" and kind == "grad":
                    assert np.isnan(values[f"grad/norm/p{i}"])  # its squares are below float32
                else:
                    assert values[f"{kind}/norm/p{i}"] == pytest.approx(true, rel=NEAR, nan_ok=True)
            if not (case == "tiny" and kind == "grad"):
                everything = reference.norm(*(array.astype(np.float64) for array in arrays))
                assert values[f"{kind}/norm"] == pytest.approx(everything, rel=NEAR, nan_ok=True)
        assert values["grad/nonfinite"] == (1 if case == "gradient-inf" else 0)


@pytest.mark.compiles
def test_a_step_says_what_is_of_all_ranks_and_what_of_its_shard(job):
    weights = [p.asnumpy().astype(np.float64) for p in MLP().trainable_params()]
    for i, (x, y) in enumerate(mlp_batches(2)):
        loss, gradients, outputs, _ = reference.MLP(weights).step(x, y)
        for rank in range(job.ranks):
            values, scopes = job.rows["step"][rank][i]
            assert values["grad/norm"] == pytest.approx(reference.norm(*gradients), rel=5e-6)
            assert values["weight/norm"] == pytest.approx(reference.norm(*weights), rel=5e-6)
            mine = reference.activation(np.split(np.asarray(outputs["act"]), job.ranks)[rank])
            for stat in ("mean", "rms", "absmax", "zero_fraction"):
                assert values[f"activation/{stat}/act"] == pytest.approx(mine[stat], rel=5e-6, abs=1e-6)
            assert scopes["grad/norm"] == scopes["weight/norm"] == "unverified"
            assert scopes["activation/rms/act"] == scopes["loss"] == "shard"
        weights = [w - 0.5 * g for w, g in zip(weights, gradients)]


def optimizer_of(network):
    return nn.SGD(network.trainable_params(), 0.1)


def batch():
    return tuple(map(Tensor, next(iter(mlp_batches(1)))))


@pytest.mark.parametrize("kind", ["step", "norms", "upgraded"])
def test_a_step_made_for_whole_tensors_does_not_compile_for_shards(mode, context, kind, told):
    """As where AutoParallel sets the mode only while it compiles what it is around."""
    network = MLP()
    if kind == "norms":
        cell = NormStats(network.trainable_params())
        inputs = (tuple(Tensor(p.asnumpy()) for p in network.trainable_params()),)
    elif kind == "step":
        cell, inputs = InstrumentedStep(network, optimizer_of(network)), batch()
    else:
        cell, inputs = upgrade(nn.TrainOneStepCell(network, optimizer_of(network))), batch()
    context["parallel_mode"] = "semi_auto_parallel"
    with pytest.raises(ValueError, match="made for whole tensors, and is compiled with the parallel mode 'semi_auto"):
        cell(*inputs)
    if kind == "upgraded":
        assert "the first call of a training step that is measured has failed" in told.pop()


def test_norms_without_a_step_are_refused_too(context):
    context["parallel_mode"] = "semi_auto_parallel"
    with pytest.raises(ValueError, match="tensors of this rank can be shards"):
        NormStats(MLP().trainable_params())


@pytest.mark.parametrize("option", [{"accumulate": 2}, {"counts": True}, {"updates": True}, {"moments": True}], ids=str)
def test_what_goes_by_shapes_is_refused(context, option):
    context["parallel_mode"] = "semi_auto_parallel"
    network = MLP()
    optimizer = nn.Adam(network.trainable_params(), 0.1) if "moments" in option else optimizer_of(network)
    with pytest.raises(ValueError, match=f"`{next(iter(option))}` goes by the shapes of whole tensors"):
        InstrumentedStep(network, optimizer, allow_unverified=True, **option)


def test_sums_over_micro_batches_that_the_compiler_keeps_are_refused(context):
    context["parallel_mode"] = "semi_auto_parallel"
    network = nn.PipelineCell(MLP(), 2)
    with pytest.raises(ValueError, match="has a PipelineCell.*what the step sees is not the gradient"):
        InstrumentedStep(network, optimizer_of(network), allow_unverified=True)


def test_a_stage_of_a_pipeline_has_what_it_holds(context, told):
    context.update(parallel_mode="semi_auto_parallel", pipeline_stages=2)
    norm_stats = NormStats(MLP().trainable_params(), allow_unverified=True)
    assert {metric.scope for metric in norm_stats.schema} == {"shard"}


class AutoParallel(nn.Cell):
    """Named as MindSpore's, which needs several devices."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network, self._device_num = network, 2

    def construct(self, *inputs):
        return self.network(*inputs)


def test_a_monitor_leaves_a_step_inside_auto_parallel_alone(context):
    network = MLP()
    step = nn.TrainOneStepCell(network, optimizer_of(network))
    reason = begin({"train_network": AutoParallel(step)})
    assert "AutoParallel is around the training step" in reason and type(step) is nn.TrainOneStepCell
    assert begin({"train_network": AutoParallel(step)}, StepOptions(updates=False)) == reason


def test_a_warning_says_what_mindspore_scales(context, told, monkeypatch):
    context.update(parallel_mode="semi_auto_parallel", gradients_mean=True, pipeline_stages=2)
    network = MLP()
    InstrumentedStep(network, optimizer_of(network), allow_unverified=True)
    (message,) = told
    assert "gradients of replicated parameters, and those of sharded ones not" in message
    assert "Norms are of what this rank holds" in message
    told.clear()
