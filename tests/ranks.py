"""Jobs of several real processes on this machine, and what their ranks tell."""
import json
import os
import pathlib
import subprocess
import sys

from mindspore.communication import get_rank

TESTS = pathlib.Path(__file__).parent
_started = 0


def tell(name, numbers):
    """In a rank: have the test know. `numbers` is whatever JSON can hold."""
    sys.stdout.write(f"RANK {get_rank()} {name} {json.dumps(numbers)}\n")  # at once, since other threads may print too
    sys.stdout.flush()


def job(script, ranks, directory, *arguments):
    """Run a script in so many processes.

    Returns:
        `({name: [what each rank told under it, a list], ...}, what msrun and all processes printed)`.
    """
    global _started
    _started += 1
    port = 18000 + os.getpid() % 900 + 10 * _started
    environment = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                   "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    command = ["msrun", f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--log_dir={directory}", "--join=True",
               f"--master_port={port}", str(script), *arguments]
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=300)
    logs = "\n".join(path.read_text(errors="replace") for path in sorted(directory.glob("worker_*.log")))
    told = {}
    for line in logs.splitlines():
        if line.startswith("RANK "):
            _, rank, name, numbers = line.split(" ", 3)
            told.setdefault(name, [[] for _ in range(ranks)])[int(rank)].append(json.loads(numbers))
    return told, f"{done.stdout[-2000:]}{logs[-3000:]}"
