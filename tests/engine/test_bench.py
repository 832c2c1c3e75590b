"""This machine, measured, is a cluster like any other."""

import os

import pytest
from plans import small_plan
from support import assert_plausible

from trilane.config.cluster import cluster
from trilane_engine.bench import __main__ as bench

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
