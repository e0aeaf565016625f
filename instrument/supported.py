"""Which releases are tested. Imports neither MindSpore nor MindFormers, of which `doctor.py` tells without them."""
from __future__ import annotations

# MindSpore: the oldest and the newest Python that the release has a build for.
PYTHONS = {"2.0.0": ("3.7", "3.9"), "2.7.0": ("3.9", "3.11"), "2.7.1": ("3.9", "3.11"), "2.7.2": ("3.9", "3.12"),
           "2.8.0": ("3.9", "3.12"), "2.9.0": ("3.9", "3.12"), "2.10.0": ("3.10", "3.12")}
# MindFormers: the MindSpore that it is tested with.
PAIRS = {"0.8.0": "2.0.0", "1.3.2": "2.7.0", "1.6.0": "2.7.0", "1.7.0": "2.7.1", "1.9.0": "2.9.0",
         "2.1.0": "2.9.0"}
