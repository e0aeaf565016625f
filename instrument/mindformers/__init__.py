"""MindSpore Transformers: the callback `InstrumentMonitor` and the step `MFInstrumentedStep`, from YAML alone.

    callbacks:
      - type: InstrumentMonitor
        run_dir: runs/llama
        activations: blocks

Importing this module registers both with MindFormers. A program of your own imports it before it makes its `Trainer`. For
`run_mindformer.py` there are two ways: run it by this module,

    python -m instrument.mindformers run_mindformer.py --config my.yaml

or let MindFormers (1.3.2 and later) import it: by a line more in the YAML block,

    auto_register: instrument_mf.InstrumentMonitor      # or instrument_mf.MFInstrumentedStep

and the folder that `instrument mindformers` prints, in the environment variable REGISTER_PATH or as `--register_path`.
"""
from __future__ import annotations

from pathlib import Path

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

from instrument import upgrade
from instrument.mindformers import releases
from instrument.mindformers.monitor import InstrumentMonitor
from instrument.mindformers.pipeline import REASON_OF_OLD, MFInstrumentedPipelineStep
from instrument.mindformers.steps import MFInstrumentedStep

__all__ = ["InstrumentMonitor", "MFInstrumentedPipelineStep", "MFInstrumentedStep", "REGISTER_PATH"]

# The folder for the environment variable of this name, in which MindFormers looks for what `auto_register` names.
REGISTER_PATH = str(Path(__file__).parent / "register")

MindFormerRegister.register_cls(InstrumentMonitor, MindFormerModuleType.CALLBACK)
MindFormerRegister.register_cls(MFInstrumentedStep, MindFormerModuleType.WRAPPER)
upgrade.register(releases.MFTrainOneStepCell, MFInstrumentedStep)
if releases.PIPELINE_SHOWS_GRADIENTS:
    upgrade.register(releases.MFPipelineWithLossScaleCell, MFInstrumentedPipelineStep)
else:
    upgrade.refuse(releases.MFPipelineWithLossScaleCell, REASON_OF_OLD)
