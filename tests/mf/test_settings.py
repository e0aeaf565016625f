"""The classes by themselves, without the Trainer."""
from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

import reference

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def build(trainer, **settings):
    return trainer.MindFormerRegister.get_instance_from_cfg(
        trainer.MindFormerConfig(type="InstrumentMonitor", **settings), trainer.MindFormerModuleType.CALLBACK)


def test_an_empty_key_is_its_default_and_settings_are_printed(trainer, tmp_path, capsys):
    monitor = build(trainer, run_dir=str(tmp_path / "run"), activations=None, every=None, activation_stats=["rms"],
                    histograms=[{"kind": "weight", "pattern": "wq", "every": None}])
    assert (monitor.options.activations, monitor.options.every) == ("blocks", 1)
    assert monitor.options.histograms == [trainer.Histogram("weight", "wq")]
    output = capsys.readouterr().out
    assert output.count("InstrumentMonitor: ") == 1 and "activations='blocks', activation_stats=['rms']" in output


def test_no_activations(trainer, tmp_path):
    assert build(trainer, run_dir=str(tmp_path / "run"), activations="none").options.activations is None


@pytest.mark.parametrize("settings, near", [({"activation": "blocks"}, "activations"), ({"rundir": "runs"}, "run_dir"),
                                            ({"histograms": [{"kind": "weight", "patern": "wq"}]}, "pattern")])
def test_an_unknown_key_is_an_error_with_near_names(trainer, tmp_path, settings, near):
    with pytest.raises(ValueError, match=f"near names:.*{near}"):
        build(trainer, run_dir=str(tmp_path / "run"), **settings)


def test_an_unknown_key_of_the_wrapper_is_an_error_with_near_names(trainer):
    with pytest.raises(ValueError, match="'use_clip_gard'; near names: use_clip_grad"):
        trainer.MindFormerRegister.get_instance_from_cfg(
            trainer.MindFormerConfig(type="MFInstrumentedStep", use_clip_gard=True), trainer.MindFormerModuleType.WRAPPER,
            default_args={"network": None, "optimizer": None})


def test_yaml_alone_makes_the_import_happen(trainer, tmp_path, monkeypatch):
    if not hasattr(trainer.MindFormerRegister, "auto_register"):
        pytest.skip("this MindFormers has no auto_register")
    monkeypatch.setenv("REGISTER_PATH", trainer.instrument.mindformers.REGISTER_PATH)
    callbacks = trainer.MindFormerRegister.registry[trainer.MindFormerModuleType.CALLBACK]
    monkeypatch.delitem(callbacks, "InstrumentMonitor")
    monitor = build(trainer, auto_register="instrument_mf.InstrumentMonitor", run_dir=str(tmp_path / "run"))
    assert isinstance(monitor, trainer.instrument.mindformers.InstrumentMonitor)


def test_a_pipeline_is_refused_with_its_reason(trainer):
    step = trainer.nn.Cell()
    step.__class__ = trainer.MFPipelineWithLossScaleCell
    shows = trainer.instrument.mindformers.releases.PIPELINE_SHOWS_GRADIENTS
    with pytest.raises(trainer.CannotUpgrade, match="semi-automatic parallel alone" if shows else "cannot be measured"):
        trainer.upgrade(step)


@pytest.mark.parametrize("per_token", [False, True])
def test_losses_that_are_kept_apart(trainer, mode, per_token, monkeypatch):
    number = trainer.number_of_parts()
    if not number:
        pytest.skip("this MindFormers keeps no losses apart")
    ms, nn, ops = trainer.ms, trainer.nn, trainer.ops
    monkeypatch.setattr("mindformers.wrapper.wrapper.is_legacy_model", lambda: False)

    class Losses(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(4, 3, has_bias=False)
            self.count = ms.Tensor([7.0], ms.float32)

        def get_gpt_transformer_config(self):
            return types.SimpleNamespace()

        def construct(self, x):
            y = ops.reshape(ops.ReduceSum()(ops.Square()(self.dense(x)), 0), (3,))
            more = ()
            if number == 4:
                more = (self.count * 0,)
            if per_token:
                return (y[:1], self.count, y[1:2], self.count, y[2:]) + more
            return (y[:1], y[1:2], y[2:]) + more

    network = Losses()
    weight = np.random.RandomState(0).normal(size=(3, 4)).astype(np.float32)
    network.dense.weight.set_data(ms.Tensor(weight))
    step = trainer.instrument.mindformers.MFInstrumentedStep(
        network, nn.SGD(network.trainable_params(), 0.0), scale_sense=8.0, calculate_per_token_loss=per_token,
        activations=["dense"], activation_gradients=True)
    x = np.random.RandomState(1).normal(size=(5, 4)).astype(np.float32)
    divisor = 7 if per_token else 1
    for _ in range(3):
        step(ms.Tensor(x))
        values = step.schema.unpack(step.snapshot())
        y = x.astype(np.float64) @ weight.T.astype(np.float64)
        parts = (y ** 2).sum(0) / divisor
        assert [values[f"loss/{name}"] for name in ("lm", "mtp", "aux")] == pytest.approx(parts, rel=1e-6)
        assert values["loss"] == pytest.approx(parts.sum(), rel=1e-6)
        assert values["grad/norm"] == pytest.approx(reference.norm(2 * y.T @ x / divisor), rel=1e-6)
        assert values["activation_grad/rms/dense"] == pytest.approx(np.sqrt(np.mean((2 * y / divisor) ** 2)), rel=1e-6)


def test_alarms_and_writers_from_yaml(trainer, tmp_path):
    monitor = build(trainer, run_dir=str(tmp_path / "run"), alarms=[{"type": "NonFinite", "policy": "stop"}],
                    writers=[{"type": "CsvWriter", "path": str(tmp_path / "run.csv")}])
    [alarm] = monitor.alarms
    assert (alarm.name, alarm.policy) == ("NonFinite", "stop")
    assert "CsvWriter" in [type(writer).__name__ for writer in monitor.writers]
    assert build(trainer, run_dir=str(tmp_path / "none"), alarms="none").alarms == []


@pytest.mark.parametrize("settings, message", [
    ({"alarms": [{"type": "NonFinit"}]}, "the type 'NonFinit'; near names: NonFinite"),
    ({"alarms": [{"type": "NonFinite", "polisy": "stop"}]}, "'polisy'; near names: policy"),
    ({"writers": [{"type": "CsvWrite"}]}, "the type 'CsvWrite'; near names: CsvWriter")])
def test_an_unknown_alarm_or_writer_is_an_error_with_near_names(trainer, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        build(trainer, run_dir=str(tmp_path / "run"), **settings)


def test_an_untested_release_is_warned_of_once(trainer):
    warn = trainer.instrument.mindformers.releases.warn_if_untested
    with pytest.warns(UserWarning, match="not been tested with MindFormers 9.9.9"):
        warn("9.9.9")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn("9.9.9")
        warn(trainer.instrument.mindformers.releases.TESTED[-1])


def test_a_script_is_run_after_the_registration(trainer, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""import sys
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
assert MindFormerRegister.is_exist(MindFormerModuleType.CALLBACK, "InstrumentMonitor")
print("arguments:", sys.argv[1:], __name__)
""", "utf-8")
    path = os.pathsep.join(filter(None, [str(Path(trainer.instrument.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    result = subprocess.run([sys.executable, "-m", "instrument.mindformers", "script.py", "--config", "x.yaml"], cwd=tmp_path,
                            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert "arguments: ['--config', 'x.yaml'] __main__" in result.stdout, result.stderr[-2000:]
