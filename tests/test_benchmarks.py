"""The scripts of benchmarks/ run, at toy size: what they measure on a loaded machine proves nothing."""

import json
import subprocess
import sys

import pytest
from support import REPOSITORY

from trilane.launch import environment

pytestmark = pytest.mark.slow


def said(name: str, *words: str) -> dict:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / name), *words, "--json"]
    env = {k: v for k, v in environment(2).items() if k != "TRILANE_PARENT_PID"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_overhead_is_that_of_pairs_in_one_run() -> None:
    found = said("engine_overhead.py", "--shape", "2,64,4,32,512", "--mbs", "2", "--gbs", "4", "--pairs", "8")
    assert found["pairs"] == 8
    for clock in ("wall", "cpu"):
        one = found[clock]
        assert 0 < one["low"] <= one["ratio"] <= one["high"]
        assert one["bare_s"] > 0


def test_the_engine_and_the_plain_one_take_turns() -> None:
    found = said("gpu_mfu.py", "--toy")
    assert found["card"] == "cpu"
    for name in ("engine", "plain"):
        assert len(found[name]["turns"]) == 2
        assert found[name]["max_bytes"] > 0
        flops = found[name]["mfu"] * 50e9 * found[name]["sec_per_it"]
        assert flops == pytest.approx(72 * 4 * 32 * 2 * 64 * 64 * (1 + 32 / 384 + 512 / (12 * 2 * 64)))
