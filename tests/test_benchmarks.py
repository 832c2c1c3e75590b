"""The scripts of benchmarks/ run, at toy size: what they measure on a loaded machine proves nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import REPOSITORY

from trilane.config import cluster as hardware
from trilane.costmodel.memory import StageMemory
from trilane.launch.local import environment

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import gpu_mfu
import mutations


def printed(name: str, *words: str) -> dict:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / name), *words, "--json"]
    env = {k: v for k, v in environment(2).items() if k != "TRILANE_PARENT_PID"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_overhead_is_that_of_pairs_in_one_run() -> None:
    found = printed("engine_overhead.py", "--shape", "2,64,4,32,512", "--mbs", "2", "--gbs", "4", "--pairs", "8")
    assert found["pairs"] == 8
    for clock in ("wall", "cpu"):
        one = found[clock]
        assert 0 < one["low"] <= one["ratio"] <= one["high"]
        assert one["bare_s"] > 0


CARDS = [
    ("h200", "NVIDIA H200", 150.1e9, ""),
    ("jz-v100-32g", "Tesla V100-SXM2-32GB", 34.1e9, ""),
    ("jz-a100-80g", "NVIDIA A100-SXM4-80GB", 85.1e9, ""),
    (
        "h200",
        "NVIDIA H100 80GB HBM3",
        85.0e9,
        "has H200-141GB, this card is NVIDIA H100 80GB HBM3; name one of dgx-h100",
    ),
    (
        "jz-v100-32g",
        "Tesla V100-SXM2-16GB",
        16.9e9,
        "has V100-32GB, this card is Tesla V100-SXM2-16GB; name one of dlperf-v100-16g",
    ),
    ("dgx-h100", "NVIDIA H100 PCIe", 85.0e9, "has H100-80GB, this card is NVIDIA H100 PCIe; name a JSON file"),
    ("h200", "", 0.0, "this machine has no GPU"),
]


@pytest.mark.parametrize(("cluster", "name", "bytes_", "rule"), CARDS, ids=str)
def test_a_rate_is_held_against_the_peak_of_the_card_that_was_found(
    cluster: str, name: str, bytes_: float, rule: str
) -> None:
    problem = gpu_mfu.other_card(hardware.cluster(cluster), name, bytes_)
    assert problem.startswith(f"cluster={cluster}: {rule}") if rule else not problem


def test_only_what_torch_allocates_is_held_against_what_it_allocated() -> None:
    """18 bytes a parameter in mixed precision, and the larger of Adam's temporary and the activations."""
    values = {"weights": 2e9, "gradients": 2e9, "optimizer": 18e9, "buffers": 5e9, "fragmentation": 6e9, "context": 7e9}
    for activations, allocated in ((1e9, 22e9), (6e9, 24.5e9)):
        stage = StageMemory(**values, activations=activations, working=5e8)
        assert gpu_mfu.allocated(stage, 1e9) == allocated
        assert gpu_mfu.allocated(stage, 1e9, denominator=False) == 22e9 + activations + 5e8


def test_every_fault_of_the_mutation_table_can_still_be_planted() -> None:
    """A table whose texts have moved would plant nothing, and count it as seen or not by chance."""
    assert len(mutations.FAULTS) >= 60 and len(set(mutations.FAULTS)) == len(mutations.FAULTS)
    for fault in mutations.FAULTS:
        whole = (REPOSITORY / "lib/trilane" / fault.file).read_text(encoding="utf-8")
        assert fault.planted(whole) != whole and (REPOSITORY / "tests" / fault.tests).exists(), fault
    with pytest.raises(ValueError, match="stands there 2 times, not once"):
        fault.planted(2 * fault.old)


@pytest.mark.slow
def test_every_step_is_taken_on_a_cpu_and_one_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equality, both paths and the plain GPT and prediction, in a turn each; `unfused-1` finds its folder taken."""
    (tmp_path / "unfused-1").mkdir()
    monkeypatch.setattr(sys, "argv", ["gpu_mfu.py", "--tiny", "--json", "--out", str(tmp_path)])
    monkeypatch.setattr(gpu_mfu, "STEPS", ("verify", "unfused-1", "fused-2", "plain-2"))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert gpu_mfu.main() == 1
    found = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "gpu_mfu.json").read_text()) == found
    assert set(found["failed"]) == {"unfused-1"} and "File exists" in found["failed"]["unfused-1"]
    assert found["targets"] == {"equality": "met"} and len(found["verify"]["rows"]) == 2
    assert found["card"] == "cpu" and found["paths"]["fused-2"].startswith("fused path (run.fused=on)")
    for name in ("fused", "plain"):
        one = found["measured"][name]
        assert len(one["turns"]) == 1 and one["max_bytes"] > 0
        flops = one["mfu"] * 50e9 * one["sec_per_it"]
        assert flops == pytest.approx(72 * 4 * 32 * 2 * 64 * 64 * (1 + 32 / 384 + 512 / (12 * 2 * 64)))
    written = (tmp_path / "gpu_mfu.md").read_text()
    assert "**unfused-1 failed**" in written
