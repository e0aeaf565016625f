"""Records that writers must survive, and what tests of several writers share."""
from __future__ import annotations

import math
import struct

import numpy as np
from tensorboardX.proto.event_pb2 import Event

from instrument import bins
from instrument.record import Incident, Record

NAMES = ("loss", "grad/norm/blocks.0.weight", "with space", "größe/损失", 'comma, "quote"', "two\nlines", "/slash/",
         "[:Scalar]")
BEGUN = Incident("NonFinite", "begin", 7, 7, 1, "loss is nan", "loss", math.nan, "blocks.1.dense")
ENDED = Incident("NonFinite", "end", 7, 9, 3, "loss is nan", "loss", math.nan, "blocks.1.dense")


def counts(**where):
    """Counts with so many in these places, by the names of `bins` or `octave_<k>` for magnitudes from 2**k."""
    found = np.zeros(bins.BINS, np.int64)
    for name, number in where.items():
        place = getattr(bins, name) if name in ("ZERO", "NONFINITE") else int(name.split("_")[1]) - bins.LOWEST + bins.ZERO + 1
        found[place] = number
    return found


RECORDS = {
    "usual": Record(1, 100.0, {"loss": 2.5, "grad/norm": 0.5}),
    "empty": Record(2, 100.0, {}),
    "nan in every field": Record(3, 100.0, dict.fromkeys(NAMES, math.nan)),
    "infinite": Record(4, 100.0, dict.fromkeys(NAMES, -math.inf)),
    "too large for float32": Record(5, 100.0, {"loss": 1e300, "grad/norm": -1e300}),
    "other types of numbers": Record(6, 100.0, {"loss": np.float32(1.5), "grad/norm": 3, "skipped": True}),
    "missing values": Record(7, 100.0, {"val/loss": 0.5}),
    "texts": Record(8, 100.0, {}, {}, {"sample/0": "a\n\n# b\x00 \ud800 ü", "empty": "", "with space": "x" * 100_000}),
    "alarms": Record(9, 100.0, {"loss": math.nan}, {}, {}, (BEGUN, ENDED)),
    "histograms": Record(10, 100.0, {"loss": 1.0}, {
        "histogram/weight/none": counts(), "histogram/weight/all nan": counts(NONFINITE=5),
        "histogram/weight/zeros": counts(ZERO=3), "histogram/weight/huge": np.full(bins.BINS, 2 ** 40)}),
    "clock set back": Record(11, -5.0, {"loss": 1.0}),
    "steps anew": Record(1, 101.0, {"loss": 1.0}),
    "many steps": Record(2 ** 40, 102.0, {"loss": 1.0}),
}


def events_of(run):
    """Every event of every event file, by TFRecord's own framing."""
    events = []
    for file in sorted(run.glob("events.out.tfevents.*")):
        content = file.read_bytes()
        while content:
            length, = struct.unpack_from("<Q", content)
            events.append(Event.FromString(content[12:12 + length]))  # behind 8 bytes of length and 4 of its checksum
            content = content[16 + length:]  # a checksum of 4 bytes ends it
    return events
