"""Runs of MindFormers' real Trainer: a LLaMA of two layers on a CPU. Skipped where MindFormers is not installed."""
import importlib.util
import os
import tempfile
import warnings

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "mindformers: needs MindFormers; runs its Trainer")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "mf":
            item.add_marker("mindformers")
            # One measured run, and what needs none.
            if "measured" in item.fixturenames or item.path.stem == "test_settings":
                item.add_marker("core")


@pytest.fixture(scope="session")
def trainer():
    """The module that runs the Trainer."""
    if importlib.util.find_spec("mindformers") is None:
        pytest.skip("MindFormers is not installed")
    folder = tempfile.mkdtemp()
    os.environ.setdefault("LOCAL_DEFAULT_PATH", folder)  # where MindFormers writes logs, once it is imported
    os.environ.setdefault("OM_MODULES_CACHE", os.path.join(folder, "modules"))  # and copies of what `auto_register` names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trainer
    return trainer
