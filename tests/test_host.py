"""Host numbers: what is asked, how often, and that what nobody tells is absent."""
import os
import stat
import time

import psutil
import pytest

from instrument import host
from instrument.host import HostStats, accelerator


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A directory that is all of PATH; makes tools that print a text."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name, text, status=0):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/{name}.args\n/bin/cat <<'END'\n{text}\nEND\nexit {status}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        return tmp_path / f"{name}.args"

    return make


def test_memory_and_load_of_this_process():
    values = HostStats().sample()
    assert set(values) == {"host/memory", "host/memory_available", "host/cpu"}
    resident = psutil.Process(os.getpid()).memory_info().rss
    assert values["host/memory"] == pytest.approx(resident, rel=0.2)
    assert 0 < values["host/memory_available"] < psutil.virtual_memory().total
    assert 0 <= values["host/cpu"] <= os.cpu_count() + 1


def test_busy_cores_are_those_since_the_last_sample():
    stats = HostStats(seconds=0.0)
    process = psutil.Process()
    whole = sum(process.cpu_times()[:2]) / (time.time() - process.create_time())
    assert stats.sample()["host/cpu"] == pytest.approx(whole, rel=0.05, abs=0.05)  # the first: since the process began
    started, began = time.process_time(), time.monotonic()
    while time.process_time() - started < 0.5:
        pass
    busy = stats.sample()["host/cpu"]
    assert busy == pytest.approx((time.process_time() - started) / (time.monotonic() - began), rel=0.1)
    time.sleep(0.5)
    assert stats.sample()["host/cpu"] < 0.2


def test_a_machine_is_asked_once_in_a_while(tools):
    tools("nvidia-smi", "50, 1024")
    now = 0.0
    stats = HostStats(seconds=2.0, clock=lambda: now, device=0)
    assert "device/utilization" in stats.sample() and stats.sample() == {}
    now = 2.0
    assert "host/memory" in stats.sample() and "device/utilization" not in stats.sample()
    now = 11.0
    assert "device/utilization" in stats.sample()


def test_memory_of_the_device_is_added():
    assert HostStats(device_memory=lambda: {"device/memory": 5.0}).sample()["device/memory"] == 5.0


def test_a_gpu_tells_by_its_tool(tools, monkeypatch):
    arguments = tools("nvidia-smi", "87, 40960")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert accelerator(1) == {"device/utilization": 0.87, "device/memory_used": 40960 * 2.0 ** 20}
    assert "--id=5" in arguments.read_text()


def test_an_npu_tells_by_its_tool(tools):
    text = ("\tNPU ID                         : 2\n\tChip Count                     : 1\n\n"
            "\tHBM Capacity(MB)               : 65536\n\tHBM Usage Rate(%)              : 25\n"
            "\tAicore Usage Rate(%)           : 42\n\tChip ID                        : 0\n")
    arguments = tools("npu-smi", text)
    assert accelerator(2) == {"device/utilization": 0.42, "device/memory_used": 65536 * 2.0 ** 20 / 4}
    assert arguments.read_text().split() == ["info", "-t", "usages", "-i", "2"]


@pytest.mark.parametrize("name, text, status", [
    ("nvidia-smi", "[N/A], [N/A]", 0), ("nvidia-smi", "No devices were found", 6), ("nvidia-smi", "", 0),
    ("npu-smi", "Failed to get", 1), ("npu-smi", "Aicore Usage Rate(%) : NA", 0)])
def test_what_a_tool_does_not_tell_is_absent(tools, name, text, status):
    tools(name, text, status)
    assert accelerator() == {}


def test_without_a_tool_nothing_is_told(tools):
    assert accelerator() == {}


def test_a_cpu_asks_no_tool(tools):
    arguments = tools("nvidia-smi", "87, 40960")
    HostStats().sample()
    assert not arguments.exists()


def test_a_tool_that_hangs_is_left(tools, monkeypatch):
    tools("nvidia-smi", "1, 1")
    monkeypatch.setattr(host.subprocess, "run", _timed_out)
    assert accelerator() == {}


def _timed_out(command, **options):
    raise host.subprocess.TimeoutExpired(command, options["timeout"])
