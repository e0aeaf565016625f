"""Shared fixtures, and the order of the tests: what compiles nothing runs first, so that a typo shows in seconds."""
import os
import sys

os.environ.setdefault("GLOG_v", "3")  # MindSpore reads it once, when it is imported; 3 shows errors and not warnings

import hypothesis  # noqa: E402
import mindspore as ms  # noqa: E402
import pytest  # noqa: E402

# How long an example takes, or takes to make, says nothing on a machine that does other things as well.
hypothesis.settings.register_profile("instrument", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("instrument")

MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}

# What must hold on every release: the numbers, and that training is what it was.
CORE = {"test_schema", "test_stats", "test_norms", "test_taps", "test_losses", "test_step", "test_compat", "test_like_cells",
        "test_misuse", "test_numbers", "test_sparse_gradients", "test_frozen_midway", "test_upgrade", "test_monitor_upgrades",
        "test_loop"}
# The same for what a step can do besides.
OPTIONS = {"test_every", "test_nonfinite", "test_optimizer_stats", "test_spikes", "test_window", "test_attention",
           "test_histograms", "test_histograms_in_step", "test_micro_batches"}


def pytest_configure(config):
    config.addinivalue_line("markers", "core: must hold on every release of MindSpore")
    config.addinivalue_line("markers", "options: the same for options that are off by default")
    config.addinivalue_line("markers", "compiles: compiles graphs without the `mode` fixture, so it runs after the fast tests")
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    session.config.exit_status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    # MindSpore 2.0.0 keeps modules whose cells it has compiled in variables of C++, and frees them when the interpreter is no
    # more: after some hundred tests that is a segmentation fault, and its status would be taken for that of the tests.
    if ms.__version__ == "2.0.0" and hasattr(config, "exit_status"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.exit_status)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem in CORE:
            item.add_marker("core")
        if item.path.stem in OPTIONS:
            item.add_marker("options")
    items.sort(key=lambda item: "mode" in item.fixturenames or item.get_closest_marker("compiles") is not None)


@pytest.fixture(autouse=True)
def told(monkeypatch):
    """What `tell` printed since warnings are errors here; a test that expects some clears it."""
    messages = []
    monkeypatch.setattr("instrument.notices.print", lambda message, **_: messages.append(message), raising=False)
    yield messages
    assert not messages


@pytest.fixture
def context(monkeypatch):
    """The settings of a parallel job, as far as anyone asks."""
    settings = {"parallel_mode": "stand_alone", "enable_parallel_optimizer": False, "gradients_mean": False,
                "pipeline_stages": 1}
    monkeypatch.setattr("instrument.scopes._told", set())
    with monkeypatch.context() as patched:
        patched.setattr(ms, "get_auto_parallel_context", settings.__getitem__)
        yield settings


@pytest.fixture(params=MODES)
def mode(request):
    """The test runs once in graph mode and once in PyNative mode; graph mode is what other tests find."""
    ms.set_context(mode=MODES[request.param], device_target="CPU")
    yield request.param
    ms.set_context(mode=ms.GRAPH_MODE)
