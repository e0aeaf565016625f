"""Fork writers of one run, kill each at a random moment, and resume; what was lost goes to the standard output.

    python killed.py DIRECTORY TIMES SEED

Of its own, without MindSpore, whose threads a fork would lose. Each child writes records as fast as it can and says so for
each of them, behind the write.
"""
import json
import os
import random
import select
import signal
import struct
import sys
import time

import numpy as np

import instrument
from instrument import runs
from instrument.bins import BINS
from instrument.record import Record
from instrument.writers import JsonlWriter


def values(step):
    """What a record of that step has, so that the parent knows what must be there."""
    return {"loss": float(step), "größe/a b": step / 3, "odd": float("nan") if step % 2 else -0.5}


def child(directory, first, told):
    run = runs.create(directory, resume=True)
    writer = JsonlWriter(run, rotate_bytes=20_000)
    writer.start(run.info())
    step = first
    while True:
        histograms = {"h": np.full(BINS, step)} if step % 10 == 0 else {}
        writer.write(Record(step, 0.0, values(step), histograms, {"said": str(step)} if step % 7 == 0 else {}))
        os.write(told, struct.pack("q", step))
        step += 1


def main(directory, times, seed):
    rng = random.Random(seed)
    known, torn, lost = 0, 0, []
    for _ in range(times):
        told, tell = os.pipe()
        # As from a checkpoint some steps back, at times.
        first = max(known + 1 - rng.choice((0, 0, 3)), 1)
        pid = os.fork()
        if pid == 0:
            try:
                child(directory, first, tell)
            finally:
                os._exit(1)
        os.close(tell)
        select.select([told], [], [], 10)  # it has written something
        time.sleep(rng.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        heard = b"".join(iter(lambda told=told: os.read(told, 1 << 16), b""))
        os.close(told)
        if not os.WIFSIGNALED(status) or len(heard) < 8:
            sys.exit(f"the writer ended by itself, with status {status}")
        known = struct.unpack_from("q", heard, len(heard) - 8)[0]

        run = instrument.read(directory, processes=1)
        run.histograms  # noqa: B018 - counts their lines
        torn = max(torn, run.skipped)
        # The record after the last known one may be there: its child was killed before it could tell.
        steps = run["loss"].step
        expected = list(range(1, max(known, int(steps[-1])) + 1))
        for name in values(1):
            step, value = run[name]
            if step.tolist() != expected or len(expected) > known + 1 or not np.array_equal(
                    value, [values(each)[name] for each in expected], equal_nan=True):
                lost.append([name, known, step.tolist()[-5:]])
        for name, kept in (("h", run.histograms["h"].step.tolist() if run.histograms else []),
                           ("said", [text["step"] for text in run.texts])):
            every = 10 if name == "h" else 7
            if [step for step in kept if step <= known] != list(range(every, known + 1, every)):
                lost.append([name, known, kept[-5:]])
    config = runs.read_config(directory)
    print(json.dumps({"steps": known, "torn": torn, "lost": lost, "resumes": len(config["resumes"]),
                      "files": len(list(os.scandir(directory)))}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
