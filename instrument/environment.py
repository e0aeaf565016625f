"""What `config.json` says of the process that makes a run: where, when, by which command, with which versions and code.

Nothing here raises: what cannot be found out is absent. Does not import MindSpore.
"""
from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import psutil

_GIT_SECONDS = 3.0  # a repository on a slow disk must not keep training waiting


def process() -> dict[str, Any]:
    """`{time, command, host, pid}` of this process; the time is now, in UTC, as ISO 8601 has it."""
    return {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": [sys.executable, *sys.argv],
            "host": socket.gethostname(), "pid": os.getpid()}


def hardware() -> str:
    """Processor, cores and memory, in a line."""
    return (f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
            f"{psutil.virtual_memory().total / 2**30:.0f} GiB")


def versions() -> dict[str, str]:
    """Versions of Python, MindSpore, NumPy and this package, as far as they are known."""
    # MindSpore's builds for a device have distribution names of their own, so the loaded module is asked.
    mindspore = getattr(sys.modules.get("mindspore"), "__version__", None) or version_of("mindspore")
    found = {"python": platform.python_version(), "mindspore": mindspore}
    found.update((name, version_of(name)) for name in ("mindspore-instrument", "numpy"))
    return {name: version for name, version in found.items() if version is not None}


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None where pip knows none, as in a source checkout."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def git() -> dict[str, Any] | None:
    """`{commit, dirty}` of the working directory's repository, `dirty` meaning tracked files that differ; None without one."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, **({} if changes is None else {"dirty": bool(changes)})}


def _git(*command: str) -> str | None:
    try:
        # Without optional locks: a look must not stand in the way of what the user does in the repository.
        result = subprocess.run(["git", "--no-optional-locks", *command], capture_output=True, text=True, errors="replace",
                                timeout=_GIT_SECONDS, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
