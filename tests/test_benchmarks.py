"""The scripts of benchmarks/ run, at toy size: what they measure on a loaded machine proves
nothing.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import REPOSITORY

from trilane.config import cluster as hardware
from trilane.launch.local import environment

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import gpu_mfu


def begun_alone(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / name), *words, "--json"]
    env = {k: v for k, v in environment(2).items() if k != "TRILANE_PARENT_PID"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def printed(name: str, *words: str) -> dict:
    done = begun_alone(name, *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_overhead_is_that_of_pairs_in_one_run():
    words = "--shape 2,64,4,32,512 --mbs 2 --gbs 4 --pairs 8"
    found = printed("engine_overhead.py", *words.split())
    assert found["pairs"] == 8
    for clock in ("wall", "cpu"):
        one = found[clock]
        assert 0 < one["low"] <= one["ratio"] <= one["high"]
        assert one["bare_s"] > 0


CARDS = [
    ("h200", "NVIDIA H200", 150.1e9, ""),
    (
        "h200",
        "NVIDIA H100 80GB HBM3",
        85.0e9,
        "has H200-141GB, this card is NVIDIA H100 80GB HBM3; name one of dgx-h100",
    ),
]


@pytest.mark.parametrize(("cluster", "name", "bytes_", "rule"), CARDS, ids=str)
def test_a_rate_is_held_against_the_peak_of_the_card_that_was_found(
    cluster, name: str, bytes_: float, rule: str
):
    problem = gpu_mfu.other_card(hardware.cluster(cluster), name, bytes_)
    assert problem.startswith(f"cluster={cluster}: {rule}") if rule else not problem


def begun(out: Path, monkeypatch, *words: str) -> tuple[int, dict]:
    """Exit code and JSON of gpu_mfu.py with a tiny model."""
    monkeypatch.setattr(sys, "argv", ["gpu_mfu.py", "--tiny", "--json", "--out", str(out), *words])
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    return gpu_mfu.main(), json.loads((out / "gpu_mfu.json").read_text())


@pytest.mark.slow
def test_every_kind_of_step_is_taken_on_a_cpu(tmp_path, monkeypatch):
    """Equality, the engine with a lever and without, the plain GPT, the trace, each with what the
    planner says.
    """
    code, found = begun(
        tmp_path, monkeypatch, "--steps", "verify,engine,plain,trace,full recomputation"
    )
    assert code == 0 and not found["failed"], found["failed"]
    assert [row["ok"] for row in found["steps"]["verify"]["rows"]] == [True, True]
    assert found["steps"]["engine"]["path"].startswith("fused path (run.fused=on)")
    assert (
        found["measured"].keys() == {"plain", "engine", "full recomputation"}
        and found["measured"]["plain"]["mfu"] > 0
    )
    ratios = {"seconds_over_measured", "bytes_over_measured", "traced_over_measured"}
    assert ratios < found["measured"]["engine"].keys()
    assert (
        found["steps"]["trace"]["flops"] > 0
        and "| full recomputation |" in (tmp_path / "gpu_mfu.md").read_text()
    )
