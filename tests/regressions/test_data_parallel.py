"""Two real processes: the gradient norm is that of the joined batch, on every rank, before and after clipping."""
import json
import os
import pathlib
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest

import reference
from instrument import _compat
from networks import MLP, mlp_batches

HERE = pathlib.Path(__file__).parent


def ranks(mode, tmp_path, port):
    """What each of two ranks printed, by rank."""
    environment = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                   "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])}
    command = ["msrun", "--worker_num=2", "--local_worker_num=2", f"--master_port={port}", f"--log_dir={tmp_path}",
               "--join=True", str(HERE / "data_parallel_rank.py"), mode]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    logs = "\n".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("worker_*.log")))
    rows = {0: [], 1: []}
    for line in logs.splitlines():
        if line.startswith("RANK "):
            _, rank, values = line.split(" ", 2)
            rows[int(rank)].append(json.loads(values))
    assert len(rows[0]) == len(rows[1]) == 4, done.stdout[-2000:] + logs[-3000:]
    return rows


@pytest.mark.skipif(_compat.RELEASE.release < (2, 7), reason="2.0.0 has no msrun, and refuses PyNative data parallel on a CPU")
def test_norms_of_two_ranks_are_those_of_the_joined_batch(mode, tmp_path):
    rows = ranks(mode, tmp_path, 18700 + os.getpid() % 1000)
    weights = [p.asnumpy().astype(np.float64) for p in MLP().trainable_params()]
    ms.set_context(mode=ms.GRAPH_MODE)
    history = []
    for i, (x, y) in enumerate(mlp_batches(4)):
        loss, gradients, outputs, _ = reference.MLP(weights).step(x, y)
        norm = reference.norm(*gradients)
        for rank in (0, 1):
            values = rows[rank][i]
            assert values["step"] == i + 1
            assert values["grad/norm"] == pytest.approx(norm, rel=5e-6)  # float32 forward, backward and reduction
            assert values["grad/norm_clipped"] == pytest.approx(min(norm, 0.5), rel=5e-6)
            assert values["weight/norm"] == pytest.approx(reference.norm(*weights), rel=5e-6)
            assert values["update/norm"] == pytest.approx(0.5 * min(norm, 0.5), rel=5e-6) and values["skipped"] == 0
            if i < 2:
                assert np.isnan(values["spike/score"])
            else:  # of the loss of the joined batch, so that the ranks decide alike
                mean, deviation = np.mean(history[-2:], 0), np.std(history[-2:], 0)
                assert values["spike/score"] == pytest.approx(np.max(([loss, norm] - mean) / deviation), rel=1e-3)
                assert values["spike/score"] == rows[1 - rank][i]["spike/score"]
            # activations are this rank's own
            own = reference.activation(outputs["act"][4 * rank:4 * rank + 4])
            assert values["activation/rms/act"] == pytest.approx(own["rms"], rel=5e-6)
        history.append([loss, norm])
        weights = [w - 0.5 * min(1, 0.5 / norm) * g for w, g in zip(weights, gradients)]
