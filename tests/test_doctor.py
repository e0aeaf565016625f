"""`instrument doctor`: the rules on versions, and trials that go wrong in every way."""
import sys

import pytest
from rich.console import Console

from instrument import doctor, doctor_report

GOOD = {"mindspore": "2.10.0", "numpy": "1.26.4", "pillow": "11.0.0"}


def problems(versions, python="3.11", requirements=None):
    return [finding for finding in doctor.clashes(versions, python, requirements or {}) if finding.is_problem]


def test_nothing_is_said_of_what_goes_together():
    assert doctor.clashes(GOOD, "3.11", {}) == []
    assert doctor.clashes({"mindspore": "2.0.0", "numpy": "1.24.4", "pillow": "9.5.0"}, "3.9", {}) == []
    assert doctor.clashes({**GOOD, "mindspore": "2.9.0", "mindformers": "1.9.0", "setuptools": "80.9.0"}, "3.10", {}) == []


@pytest.mark.parametrize("versions, fix", [
    ({**GOOD, "numpy": "2.0.0"}, 'pip install "numpy<2"'),
    ({"mindspore": "2.0.0", "pillow": "10.0.0"}, 'pip install "pillow<10"'),
    ({"mindspore": "2.9.0", "mindformers": "1.9.0", "setuptools": "81.0.0"}, 'pip install "setuptools<81"'),
    ({"mindspore-ascend": "2.7.0", "mindspore": "2.7.0"},
     "pip uninstall -y mindspore mindspore-ascend, and then install one of them"),
    ({}, 'pip install "mindspore-instrument[mindspore]"      # for a CPU'),
])
def test_each_clash_has_one_line_that_mends_it(versions, fix):
    assert [finding.fix for finding in problems(versions)] == [fix]


def test_a_python_without_a_build_of_mindspore_is_told():
    (finding,) = problems({}, "3.13")
    assert "no build for Python 3.13" in finding.says and finding.fix.startswith("python3.12 -m venv")
    assert "no build" not in problems({}, "3.12")[0].says


def test_releases_are_compared_as_versions():
    assert problems({**GOOD, "mindspore": "2.0.0", "pillow": "9.5.0"}) == []
    assert problems({**GOOD, "mindspore": "2.10.0", "pillow": "12.0.0"}) == []  # 2.10 is not older than 2.2
    (finding,) = doctor.clashes({**GOOD, "mindspore": "2.3.1"}, "3.9", {})
    assert "has not been tested" in finding.says and not finding.is_problem


def test_a_pair_that_was_not_tested_is_a_note():
    (finding,) = doctor.clashes({**GOOD, "mindspore": "2.10.0", "mindformers": "1.9.0"}, "3.10", {})
    assert "has been tested with MindSpore 2.9.0" in finding.says and not finding.is_problem
    (finding,) = doctor.clashes({**GOOD, "mindformers": "9.9.9"}, "3.10", {})
    assert "MindFormers 9.9.9 has not been tested" in finding.says


def test_what_mindspore_says_that_it_needs_is_looked_at():
    needs = {"mindspore": ["protobuf>=7.34.1", "numpy>=1.25", 'pillow<5; python_version < "3"', "absent>=1", "not one!"]}
    (finding,) = problems({**GOOD, "protobuf": "5.29.0"}, requirements=needs)
    assert finding.fix == 'pip install "protobuf>=7.34.1"' and "mindspore 2.10.0 needs >=7.34.1" in finding.says
    assert problems({**GOOD, "protobuf": "7.35.0"}, requirements=needs) == []
    (finding,) = problems({**GOOD, "numpy": "1.20.0"}, requirements=needs)
    assert finding.fix == 'pip install "numpy>=1.25,<2"'


def test_this_environment_has_no_clash():
    versions = doctor.installed()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert [finding.says for finding in doctor.clashes(versions, python) if finding.is_problem] == []


def test_every_extra_has_the_line_that_installs_it():
    assert doctor.extras(dict.fromkeys([*doctor.EXTRAS, "tensorboard"], "1")) == []
    assert {finding.fix for finding in doctor.extras({})} == {
        "pip install tensorboard", *(f'pip install "mindspore-instrument[{extra}]"' for _, extra in doctor.EXTRAS.values())}


def said_by(code, seconds=60.0):
    return list(doctor.trials(("graph",), seconds=seconds, command=(sys.executable, "-c", code)))


def test_a_process_that_dies_is_told_with_its_last_words():
    said = said_by("import os, sys; print('{\"option\": \"norms\", \"error\": 1e-8}', flush=True); "
                   "print('no driver', file=sys.stderr, flush=True); os.abort()")
    assert said == [{"mode": "graph", "option": "norms", "error": 1e-8},
                    {"mode": "graph", "failed": "the process ended with signal 6: no driver"}]
    (said,) = said_by("raise SystemExit(3)")
    assert said == {"mode": "graph", "failed": "the process ended with status 3: it printed nothing"}


def test_a_process_that_hangs_is_ended():
    (said,) = said_by("import time; time.sleep(60)", seconds=1.0)
    assert "longer than 1 s" in said["failed"]


def shown(said, monkeypatch, capsys, versions=GOOD):
    monkeypatch.setattr(doctor, "installed", lambda: dict(versions))
    monkeypatch.setattr(doctor, "trials", lambda modes, device: iter(said))
    monkeypatch.setattr(doctor, "_requires", lambda name: [])
    is_well = doctor_report.show(console=Console(width=120, highlight=False))
    return is_well, capsys.readouterr().out


def test_a_number_that_is_wrong_is_a_problem(monkeypatch, capsys):
    begin = {"mode": "graph", "mindspore": "2.10.0", "device": "CPU"}
    is_well, text = shown([begin, {"mode": "graph", "option": "norms", "error": 3e-8}], monkeypatch, capsys)
    assert is_well and "✓ 3e-08" in text and "not tried" in text and "Nothing is wrong" in text
    for bad in (2e-3, float("inf"), float("nan")):
        is_well, text = shown([begin, {"mode": "graph", "option": "norms", "error": bad}], monkeypatch, capsys)
        assert not is_well and "do not trust it here" in text and "Something is wrong" in text
    failed = {"mode": "graph", "option": "window", "failed": "RuntimeError: [x] no kernel"}
    is_well, text = shown([begin, failed], monkeypatch, capsys)
    assert not is_well and "window, graph mode: RuntimeError: [x] no kernel" in text


def test_a_clash_alone_is_a_problem(monkeypatch, capsys):
    is_well, text = shown([], monkeypatch, capsys, {**GOOD, "numpy": "2.1.0"})
    assert not is_well and 'pip install "numpy<2"' in text
