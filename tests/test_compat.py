"""What depends on the release, the mode of parallelism or the device."""
import mindspore as ms
import pytest
from mindspore import nn
from packaging.version import Version

from instrument import InstrumentedStep, _compat
from instrument.upgrade import StepOptions, upgrade
from networks import MLP


def test_this_release_is_one_that_was_tested():
    assert ms.__version__ in _compat.TESTED


def test_an_untested_release_warns_once_and_says_which_were_tested():
    _compat.warn_if_untested.cache_clear()
    with pytest.warns(UserWarning, match=r"not been tested with MindSpore 9\.9\.9; tested: 2\.0\.0") as seen:
        _compat.warn_if_untested("9.9.9")
        _compat.warn_if_untested("9.9.9")
    assert len(seen) == 1


def test_releases_are_compared_as_versions():
    assert sorted(_compat.TESTED, key=Version) == list(_compat.TESTED)
    assert isinstance(_compat.RELEASE, Version)


@pytest.mark.parametrize("settings", [{"parallel_mode": "semi_auto_parallel"}, {"parallel_mode": "auto_parallel"},
                                      {"parallel_mode": "hybrid_parallel"}, {"enable_parallel_optimizer": True}], ids=str)
def test_modes_in_which_a_tensor_can_be_a_shard_are_refused(context, settings):
    context.update({"parallel_mode": "data_parallel", "gradients_mean": True, **settings})
    network = MLP()
    with pytest.raises(ValueError, match="tensors of this rank can be shards.*allow_unverified=True"):
        InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1))


@pytest.fixture
def sharded(context):
    """A parallel mode in which tensors are shards, as far as anyone asks."""
    context["parallel_mode"] = "semi_auto_parallel"


@pytest.mark.parametrize("kind", ["instrumented", "upgraded"])
def test_what_is_not_verified_is_marked_where_it_is_allowed(sharded, kind, told):
    for _ in range(2):
        network = MLP()
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        if kind == "instrumented":
            step = InstrumentedStep(network, optimizer, allow_unverified=True)
        else:
            step = upgrade(nn.TrainOneStepCell(network, optimizer), StepOptions(allow_unverified=True))
        scopes = {metric.name: metric.scope for metric in step.schema}
        assert {name for name, scope in scopes.items() if scope == "unverified"} == set(step.norm_stats.schema.names)
        assert set(scopes.values()) == {"unverified", "shard"}
        assert all(metric.merge != "identical" for metric in step.schema if metric.scope == "shard")
    (once,) = told
    assert "with the parallel mode 'semi_auto_parallel' nothing has been verified" in once
    told.clear()
    network = MLP()
    with pytest.raises(ValueError, match="allow_unverified=True measures all the same"):
        upgrade(nn.TrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.1)))


@pytest.mark.parametrize("option", [{"loss_scale": 8.0}, {"max_grad_norm": 1.0}, {"spike_window": 4, "skip_spikes": 3.0}],
                         ids=str)
def test_what_decides_by_a_norm_of_shards_is_refused_all_the_same(sharded, option):
    network = MLP()
    with pytest.raises(ValueError, match="decides by norms.*must not change what is trained"):
        InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1), allow_unverified=True, **option)


def test_saturation_mode_is_refused_where_overflow_must_be_seen(monkeypatch):
    monkeypatch.setattr(_compat, "device_target", lambda: "Ascend")
    monkeypatch.setenv("MS_ASCEND_CHECK_OVERFLOW_MODE", "SATURATION_MODE")
    network = MLP()
    with pytest.raises(ValueError, match="INFNAN_MODE"):
        InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1), loss_scale=8.0)
    InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1))


def test_the_stage_of_a_cell_is_that_of_the_nearest_cell_around_it():
    network = nn.SequentialCell(nn.SequentialCell(nn.Dense(2, 2), nn.Dense(2, 2)), nn.ReLU())
    assert _compat.stages_of(network)["0.1"] is None
    network[0].pipeline_stage = 1
    network[0][1].pipeline_stage = 0
    found = _compat.stages_of(network)
    stages = {name: found[name] for name in ("0", "0.0", "0.1", "1")}
    assert stages == {"0": 1, "0.0": 1, "0.1": 0, "1": None}
