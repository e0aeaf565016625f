"""Memory and load of the machine that trains: this process, and the devices' own tools.

Owns what is asked, and that a number that nobody can give is absent. It is asked in the background thread, so that a tool
that is slow costs training nothing.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable

import psutil

_TOOL_SECONDS = 10.0  # npu-smi takes about a second


class HostStats:
    """Asks at most once in `seconds`.

    Args:
        seconds: Least time between two samples.
        device: Number of the device among those that this process sees; None for a CPU, whose tool nobody is asked.
        device_memory: Returns `{metric name: bytes}` of the device; MindSpore's own call.
        clock: For tests.
    """

    def __init__(self, *, seconds: float = 1.0, device: int | None = None,
                 device_memory: Callable[[], dict[str, float]] | None = None,
                 clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock, self._device, self._device_memory = seconds, clock, device, device_memory
        self._process = psutil.Process()
        # When, and what the processors had done for it then: the first sample tells of the time since the process began.
        self._counted = time.monotonic() - (time.time() - self._process.create_time()), 0.0
        self._next = self._next_tool = clock()

    def sample(self) -> dict[str, float]:
        """The machine now.

        Returns:
            `host/memory` (bytes, resident, of this process), `host/memory_available` (bytes, of the machine), `host/cpu`
            (cores that this process has kept busy since the last sample), `device/memory` and `device/memory_peak` (bytes, of
            MindSpore's pool), `device/utilization` and `device/memory_used` (fraction; bytes) by `nvidia-smi` or `npu-smi`.
            What cannot be asked is absent. Empty where the last sample is too recent.
        """
        now = self._clock()
        if now < self._next:
            return {}
        self._next = now + self._seconds
        values = {"host/memory": float(self._process.memory_info().rss),
                  "host/memory_available": float(psutil.virtual_memory().available),
                  "host/cpu": self._cores()}
        if self._device_memory is not None:
            values.update(self._device_memory())
        if self._device is not None and now >= self._next_tool:
            self._next_tool = now + _TOOL_SECONDS
            values.update(accelerator(self._device))
        return values

    def _cores(self) -> float:
        """Seconds of processors a second; over a short time it would be as coarse as what the system counts in, 10 ms."""
        (before, done_before), times = self._counted, self._process.cpu_times()
        now, done = self._counted = time.monotonic(), times.user + times.system
        return (done - done_before) / (now - before)


def accelerator(device: int = 0) -> dict[str, float]:
    """Utilisation (fraction) and used memory (bytes) of a device, by the tool of its maker; {} without one."""
    device_name = str(_by_tool(device))
    if shutil.which("npu-smi"):
        return _npu(_output("npu-smi", "info", "-t", "usages", "-i", device_name))
    if shutil.which("nvidia-smi"):
        return _gpu(_output("nvidia-smi", f"--id={device_name}", "--query-gpu=utilization.gpu,memory.used",
                            "--format=csv,noheader,nounits"))
    return {}


def _by_tool(device: int) -> int | str:
    """The number that the device has for its tool: MindSpore counts within those that are visible."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES") or ""
    numbers = [number.strip() for number in visible.split(",") if number.strip()]
    return numbers[device] if device < len(numbers) else device


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""  # no driver, no such device, no permission: then nothing is known


def _gpu(text: str) -> dict[str, float]:
    fields = [field.strip() for field in text.strip().split(",")]
    values = {}
    for name, field, unit in zip(("device/utilization", "device/memory_used"), fields, (0.01, 2.0 ** 20)):
        if re.fullmatch(r"[\d.]+", field):  # "[N/A]" where the device does not tell
            values[name] = float(field) * unit
    return values


def _npu(text: str) -> dict[str, float]:
    """Of several chips on one card the first."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if re.fullmatch(r"[\d.]+", value.strip()):
            found.setdefault(name.strip().lower(), float(value))
    values = {}
    if "aicore usage rate(%)" in found:
        values["device/utilization"] = found["aicore usage rate(%)"] / 100
    capacity, rate = found.get("hbm capacity(mb)"), found.get("hbm usage rate(%)")
    if capacity is not None and rate is not None:
        values["device/memory_used"] = capacity * 2.0 ** 20 * rate / 100
    return values
