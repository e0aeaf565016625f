"""Runs a script, `run_mindformer.py` for one, after what is registered here; for releases without `auto_register` too.

    python -m instrument.mindformers run_mindformer.py --config my.yaml
"""
import runpy
import sys
from pathlib import Path

import instrument.mindformers  # noqa: F401  (registers)

if len(sys.argv) < 2:
    sys.exit("python -m instrument.mindformers needs a script to run, and its arguments: "
             "python -m instrument.mindformers run_mindformer.py --config my.yaml")
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
