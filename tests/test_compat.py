"""What depends on the release, the mode of parallelism or the device."""
import mindspore as ms
import pytest
from mindspore import nn
from packaging.version import Version

from instrument import InstrumentedStep, _compat
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
def test_modes_in_which_a_tensor_can_be_a_shard_are_refused(monkeypatch, settings):
    context = {"parallel_mode": "data_parallel", "enable_parallel_optimizer": False, **settings}
    network = MLP()
    with monkeypatch.context() as patched:
        patched.setattr(ms, "get_auto_parallel_context", context.__getitem__)
        with pytest.raises(ValueError, match="shards: the norms would be wrong"):
            InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1))


def test_saturation_mode_is_refused_where_overflow_must_be_seen(monkeypatch):
    monkeypatch.setattr(_compat, "device_target", lambda: "Ascend")
    monkeypatch.setenv("MS_ASCEND_CHECK_OVERFLOW_MODE", "SATURATION_MODE")
    network = MLP()
    with pytest.raises(ValueError, match="INFNAN_MODE"):
        InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1), loss_scale=8.0)
    InstrumentedStep(network, nn.SGD(network.trainable_params(), 0.1))
