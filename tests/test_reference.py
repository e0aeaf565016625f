"""The pages of the reference have every public name: what each package of `instrument` exports by `__all__`."""
import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("instrument", "instrument.alarms", "instrument.writers", "instrument.mindformers")
_spec = importlib.util.spec_from_file_location("pages", ROOT / ".ci" / "site" / "pages.py")
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)
SHOWN = {f"instrument.{each}" for _, objects in pages.REFERENCE.values() for each in objects}


def file_of(module):
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exported(package):
    """`{name: where it is defined}` of `__all__`, from the source: MindFormers need not be here."""
    tree = ast.parse(file_of(package).read_text("utf-8"))
    where = {each.asname or each.name: f"{node.module}.{each.name}" for node in ast.walk(tree)
             if isinstance(node, ast.ImportFrom) for each in node.names}
    [names] = [ast.literal_eval(node.value) for node in tree.body
               if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    return {name: where.get(name, f"{package}.{name}") for name in names}


def is_shown(path):
    """By itself, or with all of its module."""
    return path in SHOWN or path.rpartition(".")[0] in SHOWN


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package):
    names = exported(package)
    assert len(names) >= 4 and [path for path in names.values() if not is_shown(path)] == []


def test_every_package_is_looked_at():
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "instrument").rglob("__init__.py")
             if "__all__" in path.read_text("utf-8")}
    assert found == set(PACKAGES)


def test_what_the_reference_shows_exists():
    for path in SHOWN:
        module, _, name = path.rpartition(".")
        if not file_of(path).exists():
            tree = ast.parse(file_of(module).read_text("utf-8"))
            defined = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                       if isinstance(target, ast.Name)}
            imported = {each.name for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names}
            assert name in defined | imported | {getattr(node, "name", None) for node in tree.body}, path


def test_a_missing_name_is_found():
    assert not is_shown("instrument.alarms.layers.NoSuchAlarm") and is_shown("instrument.mindformers.steps.MFInstrumentedStep")
