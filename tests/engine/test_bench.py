"""This machine, measured, is a cluster like any other."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from plans import small_plan
from support import assert_plausible

from trilane.config.cluster import PRECISIONS, cluster
from trilane.engine.bench import __main__ as bench
from trilane.launch.local import environment
from trilane.utils.validation import to_mapping

SLURM = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "1"}


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """What python says, run with these arguments."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(2), capture_output=True, text=True, timeout=120, check=False)


TOGETHER = """
import contextlib
from trilane.engine.bench.__main__ import main
with contextlib.redirect_stderr(sys.stdout):
    print(main([PATH, "my-cluster"]))
"""


@pytest.mark.slow
def test_ranks_of_torchrun_write_one_cluster_together_and_never_over_another(ask: Callable, tmp_path: Path) -> None:
    """Two ranks with torchrun's variables, twice: the second time rank 0 alone reports that the file exists."""
    path = tmp_path / "mine.json"
    plan, code = small_plan(tmp_path, dp=2), f"PATH = {str(path)!r}\n{TOGETHER}"
    lines = ask(plan, code, joined=False).splitlines()
    assert [line for line in lines if " is slow: " not in line] == ["0", "0"]
    mine = cluster(str(path))
    assert (mine.name, mine.gpu.kind, mine.gpus_per_node, mine.max_nodes) == ("my-cluster", "cpu", 2, 1)
    assert_plausible(mine)
    assert "gloo all_reduce of 4 MiB by 2 ranks" in mine.sources["node_bytes_per_s"]
    before = path.read_text()
    assert ask(plan, code, joined=False) == f"trilane: out={path}: exists\n2\n2\n"
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


TWO_HOSTS = """
import os, platform
from trilane.engine.bench.__main__ import main
rank = int(os.environ["RANK"])
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
    del os.environ[name]
os.environ.update(SLURM, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank % 2))
platform.node = lambda: f"gpu{1 + rank // 2:03d}.example"
os.chdir(FOLDER)
print(main([]))
"""


@pytest.mark.slow
def test_ranks_of_srun_on_two_hosts_measure_inside_and_between(ask: Callable, tmp_path: Path) -> None:
    """Four ranks with SLURM's variables alone; unnamed, cluster and file are called as the host, less its digits."""
    env = {**SLURM, "SLURM_NODELIST": "localhost"}
    code = f"SLURM, FOLDER = {env!r}, {str(tmp_path)!r}\n{TWO_HOSTS}"
    assert ask(small_plan(tmp_path, dp=4), code, joined=False) == 4 * "0\n"
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
    two = cluster(str(tmp_path / "gpu.json"))
    assert (two.name, two.gpus_per_node, two.max_nodes) == ("gpu", 2, 2)
    assert two.cores_per_node == len(os.sched_getaffinity(0))
    assert_plausible(two)
    assert "by 2 ranks" in two.sources["node_bytes_per_s"]
    assert "by 4 ranks" in two.sources["network_bytes_per_s"]


@pytest.mark.parametrize(
    ("out", "rule"),
    [
        ("cluster.txt", "must end in .json"),
        ("nowhere/cluster.json", "its folder does not exist"),
        ("here.json", "exists"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    out: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here.json").touch()
    assert bench.main([str(tmp_path / out)]) == 2
    assert capsys.readouterr() == ("", f"trilane: out={tmp_path / out}: {rule}\n")


def test_the_command_refuses_in_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "here.json").touch()
    done = run("-m", "trilane", "measure", "machine", str(tmp_path / "here.json"))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"trilane: out={tmp_path / 'here.json'}: exists\n")


@pytest.mark.parametrize(
    ("env", "size"),
    [
        ({}, 1),
        ({"RANK": "1", "WORLD_SIZE": "4"}, 4),
        ({"SLURM_PROCID": "2", **SLURM}, 4),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, 1),  # a batch script: eight tasks were asked for, none started
    ],
    ids=["alone", "torchrun", "srun", "batch script"],
)
def test_who_else_measures_is_read_from_the_environment(env: dict[str, str], size: int) -> None:
    assert bench.world_size(env) == size


@pytest.mark.filterwarnings("ignore")  # what torch says while it is imported
def test_a_rank_a_tenth_slower_than_the_median_is_named_with_its_host() -> None:
    """9 % below is not worth a line, and neither is a precision that no card has."""
    from trilane.engine.bench.multi_rank import slow_ranks

    good = {
        "gpu.fp32_flops_per_s": 100.0,
        "pcie_bytes_per_s": 20.0,
        "gpu.bf16_flops_per_s": 0.0,
        "launch_overhead_s": 1,
    }
    every = [good, good, {**good, "gpu.fp32_flops_per_s": 91.0}, {**good, "pcie_bytes_per_s": 15.0}]
    warnings = slow_ranks(every, ["n1", "n1", "n2", "n2"])
    assert warnings == ["rank 3 on n2 is slow: pcie_bytes_per_s 25% below the median"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_every_number_of_a_cluster_has_its_source(
    kind: str, nodes: int, per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a V100, typed in, and on cores; with all the links, some, or none."""
    import torch

    from trilane.engine.bench.collectives import Link
    from trilane.engine.bench.multi_rank import MachineMeasurement as Findings
    from trilane.engine.bench.multi_rank import as_cluster

    card = SimpleNamespace(name="V100", major=7, minor=0, multi_processor_count=80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    rates = (
        "memory_bytes",
        "context_bytes",
        "memory_bytes_per_s",
        *(f"{p}_flops_per_s" for p in PRECISIONS if p != "fp8"),
    )
    others = ("pcie_bytes_per_s", "host_memory_bytes", "launch_overhead_s")
    link = Link(ranks=nodes * per_node, bytes_per_s=1e11, hop_s=1e-6, pair_bytes_per_s=1e11, pair_s=1e-5)
    found = Findings(
        device=torch.device(kind),
        host="n1",
        nodes=nodes,
        per_node=per_node,
        cores=40,
        numbers={**{f"gpu.{name}": 1e9 for name in rates}, **dict.fromkeys(others, 1e9)},
        inside=link if per_node > 1 else None,
        among=link if nodes > 1 else None,
    )
    made = as_cluster(found, "mine")
    flat = {field: value for field, value in to_mapping(made).items() if value is not None}
    named = {"name", "gpu", "sources"} | {f"gpu.{fact}" for fact in ("name", "kind", "compute_capability", "num_sms")}
    fields = {*flat, *(f"gpu.{field}" for field in flat["gpu"])}
    assert set(made.sources) == fields - named
    assert (made.gpu.kind, made.gpus_per_node, made.max_nodes) == (kind, per_node, nodes)
    assert made.node_bytes_per_s == (1e11 if nodes * per_node > 1 else 1e9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("host", "name"), [("jean-zay-ia801", "jean-zay-ia"), ("r1i4n2.example.org", "rin"), ("10", "local")]
)
def test_a_cluster_is_called_as_its_hosts_less_their_digits(host: str, name: str) -> None:
    from trilane.engine.bench.multi_rank import plain_name

    assert plain_name(host) == name


@pytest.mark.filterwarnings("ignore")
def test_a_ring_sends_everything_twice_but_for_its_own_part() -> None:
    """nccl-tests, PERFORMANCE.md: the bus bandwidth of an all_reduce is 2 (n - 1) / n of bytes / seconds."""
    from trilane.engine.bench.collectives import ring_bytes_per_s

    assert ring_bytes_per_s(1000, 2, 1.0) == 1000
    assert ring_bytes_per_s(1000, 8, 1.0) == 1750
