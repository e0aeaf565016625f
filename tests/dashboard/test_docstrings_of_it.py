"""The examples in the docstrings of the live view, of those modules that can be imported here."""
import doctest
import importlib
import pkgutil

import pytest

from instrument import dashboard


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in pkgutil.iter_modules(dashboard.__path__, "instrument.dashboard."):
        try:
            loaded = importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name.split(".")[0] in ("fastapi", "nicegui", "starlette"), error  # the session `dashboard` has them
            continue
        for test in finder.find(loaded, module.name):
            if test.examples:
                yield pytest.param(test, id=test.name.replace("instrument.dashboard.", "", 1))


@pytest.mark.parametrize("example", list(examples()))
def test_an_example_prints_what_it_says(example):
    said = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert not said, "".join(said)


def test_there_are_examples():
    assert len(list(examples())) >= 4
