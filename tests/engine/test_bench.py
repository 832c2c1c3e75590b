"""This machine, measured, is a cluster like any other."""

import subprocess
import sys
from pathlib import Path

import pytest

from trilane.hardware import cluster
from trilane.launch import environment


@pytest.mark.slow
def test_the_measured_machine_can_be_planned_on(tmp_path: Path) -> None:
    """Rates that any core of the last ten years reaches, and each number with the host and the date behind it."""
    path = tmp_path / "local.json"
    command = [sys.executable, "-m", "trilane.engine.bench", str(path)]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    local = cluster(str(path))
    assert (local.name, local.gpu.kind, local.max_gpus) == ("local", "cpu", 8)
    assert local.gpu.fp32_flops_per_s > 1e9
    assert local.gpu.memory_bytes_per_s > 1e9
    assert 1e8 < local.gpu.context_bytes < 2e9
    assert 1e-7 < local.launch_overhead_s < 1e-3
    assert local.sources["gpu.fp32_flops_per_s"].startswith("measured on ")
