"""This machine, measured, is a cluster like any other."""

import functools
import os
from types import SimpleNamespace

import pytest
import torch
from plans import small_plan
from support import assert_plausible

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.costmodel.columns import Setting, columns_of
from trilane.costmodel.constants import Constants
from trilane.costmodel.layers import flash_seconds, matmul_seconds
from trilane_engine.bench import __main__ as bench
from trilane_engine.bench import rates

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported
SLURM = {
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "1",
}
TWO_HOSTS = """
import os, platform
from trilane_engine.bench import rates
from trilane_engine.bench.__main__ import main
rank = int(os.environ["RANK"])
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    del os.environ[name]
os.environ.update(SLURM, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank % 2))
platform.node = lambda: f"gpu{1 + rank // 2:03d}.example"
rates.BUDGET_S = 0.01
os.chdir(FOLDER)
print(main([]))
"""


@pytest.mark.slow
def test_ranks_of_srun_on_two_hosts_measure_inside_and_between(ask, tmp_path):
    """Four ranks with SLURM's variables alone; unnamed, the cluster and its file are
    called local.
    """
    code = f"SLURM, FOLDER = {SLURM!r}, {str(tmp_path)!r}\n{TWO_HOSTS}"
    assert ask(small_plan(tmp_path, dp=4), code, joined=False) == 4 * "0\n"
    assert [path.name for path in tmp_path.iterdir()] == ["local.json"]
    two = cluster(f"{tmp_path}/local.json")
    assert (two.name, two.gpus_per_node, two.max_nodes) == ("local", 2, 2)
    assert two.cores_per_node == len(os.sched_getaffinity(0))
    assert_plausible(two)
    assert two.sources["all"].startswith("measured on gpu001.example by ")


@pytest.mark.parametrize(
    ("out", "rule"),
    [
        ("cluster.txt", "must end in .json"),
        ("nowhere/cluster.json", "its folder does not exist"),
        ("here.json", "exists; name another file"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    out: str, rule: str, tmp_path, capsys
):
    (tmp_path / "here.json").touch()
    assert bench.main([str(tmp_path / out)]) == 2
    assert capsys.readouterr() == ("", f"trilane: out={tmp_path / out}: {rule}\n")


H100 = cluster("dgx-h100")
PLAIN = columns_of(parse_shape("1,1,1,1,1"), Topology(precision="bf16"))
MODEL = Setting(PLAIN, H100, Constants(matmul=0.7, flash=0.4))
REACHED = {"matmul": 0.7, "flash": 0.4, "memory": 0.85, "fp8": 0.9}


def predicted_seconds(work, _: torch.device) -> float:
    """What the model predicts of the call, for an H100 with the shares REACHED."""
    work()
    if not isinstance(work, functools.partial):
        return 2 * rates.COPY_BYTES / (0.85 * H100.gpu.memory_bytes_per_s)
    a, b, *_ = work.args
    if work.func is rates.attend:
        sizes = zip(("mbs", "heads", "seq", "head_dim"), a.shape, strict=True)
        return 3.5 * flash_seconds(MODEL._replace(columns=PLAIN.changed(**dict(sizes))))
    is_fp8 = a.dtype.itemsize == 1
    peak = 0.9 * H100.gpu.fp8_flops_per_s if is_fp8 else H100.gpu.bf16_flops_per_s
    return matmul_seconds(len(a), *b.T.shape, MODEL, rate=peak)


def test_a_card_that_takes_what_the_model_predicts_gets_the_models_shares(monkeypatch):
    """The CPU computes, while the clock shows what an H100 takes."""
    monkeypatch.setattr(rates, "call_seconds", predicted_seconds)
    monkeypatch.setattr(rates, "LENGTHS", (64, 128))
    types = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", multi_processor_count=132)
    facts = rates.of_card(torch.device("cpu"), types, card)
    shares = {name: facts[f"gpu.shares.{name}"] for name in REACHED}
    assert shares == pytest.approx(REACHED)
    assert facts["gpu.fp8_flops_per_s"] == H100.gpu.fp8_flops_per_s
    card.name = "NVIDIA H100 PCIe"  # of no catalogue
    assert rates.of_card(torch.device("cpu"), types, card)["gpu.shares.memory"] == Constants.memory
