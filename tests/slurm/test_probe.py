"""A site read off SLURM: of texts as sites print them, hostile ones too; what is not known is left out and listed."""

import json
import stat
from pathlib import Path

import pytest
from slurm_cluster import Cluster as Daemons
from slurm_cluster import fake_commands

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.slurm import probe as probing
from trilane.slurm.probe import gpus_of
from trilane.slurm.sites import site

# As sinfo prints them: typed GPUs bound to sockets, two kinds of nodes in one partition, a partition that is down, and
# a line that a command of the site itself adds.
SINFO = """
site notice: maintenance on Friday
gpu*|up|1-00:00:00|90|2:64:2|515000|gpu:a100:4(S:0,1),nvme:1|milan,a100,40gb
gpu*|up|1-00:00:00|10|2:64:2|515000|gpu:a100:4(S:0-1)|milan,a100,80gb,$(id)
cpu|up|infinite|500|2:64:2|257000|(null)|(null)
old|down|infinite|5|2:8:1|64000|gpu:k80:2|(null)
$(touch x)|up|infinite|1|1:1:1|1000|gpu:2|(null)
"""
PARTITION = "PartitionName=gpu Default=YES MaxNodes=64 MaxTime=1-00:00:00 OverSubscribe=EXCLUSIVE TmpFS=x"
CONFIG = "Configuration data as of now\nClusterName             = far\nTmpFS                   = /local\n"
SAYS = {
    "sinfo": f'cat <<"END"\n{SINFO}END',
    "scontrol": f'case "$*" in *config*) cat <<"END"\n{CONFIG}END\n;; *) echo "{PARTITION}";; esac',
}


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands of a cluster elsewhere."""
    place = fake_commands(tmp_path, monkeypatch)
    for name, text in SAYS.items():
        (place / name).write_text(f"#!/bin/bash\n{text}\n")
        (place / name).chmod(stat.S_IRWXU)
    return place


def test_a_site_is_what_slurm_reports_and_the_rest_is_listed(far: Path, tmp_path: Path) -> None:
    assert main(["slurm", "site", "--probe", "--output", str(tmp_path / "far.json")]) == 0
    found, nodes = site(str(tmp_path / "far.json")), cluster(str(tmp_path / "far-cluster.json"))
    assert (found.name, found.partition, found.partitions) == ("far-gpu", "gpu", ("gpu", "cpu"))
    assert (found.gpu_type, found.constraint, found.exclusive) == ("a100", "40gb", True)
    assert found.local == ("/tmp", "/dev/shm", "/local")
    assert (nodes.gpu.name, nodes.gpus_per_node, nodes.max_nodes, nodes.cores_per_node) == ("A100-40GB", 4, 64, 128)
    assert nodes.host_memory_bytes == 515000 * 2**20 and "assumed" in " ".join(nodes.sources.values())
    for word in ("modules", "offline", "network", "qos", "allows 24 h"):
        assert word in found.sources["unknown"], word
    assert main(["slurm", "site", "--probe", "--output", str(tmp_path / "far.json")]) == 2  # nothing is overwritten
    assert not (tmp_path / "x").exists()


def test_a_card_that_slurm_does_not_name_is_asked_for(far: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (far / "sinfo").write_text("#!/bin/bash\necho 'gpu|up|infinite|4|2:32:1|515000|gpu:4|(null)'\n")
    assert main(["slurm", "site", "--probe", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["site"]["qos"], values["site"]["cluster"], values["site"]["gpu_type"]) == ([], "", "")
    assert "cluster: of gpu: name one with --gpu: A100-40GB" in "\n".join(values["unknown"])
    assert main(["slurm", "site", "--probe", "--gpu", "H100-80GB"]) == 0
    (tmp_path / "copy.json").write_text(capsys.readouterr().out)
    assert site(str(tmp_path / "copy.json")).partition == "gpu"


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:4", ("", 4)),
        ("gpu:a100:4(S:0-3)", ("a100", 4)),
        ("gpu:h100:2(S:0,2),gpu:h100:2(S:1,3)", ("h100", 4)),
        ("shard:8,gpu:v100:1,nvme:1", ("v100", 1)),
        ("(null)", ("", 0)),
        ("gpu:x", ("", 0)),
    ],
)
def test_gpus_are_counted_as_sinfo_prints_them(gres: str, found: tuple[str, int]) -> None:
    assert gpus_of(gres) == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--probe", "--partition", "gpus"], "partition=gpus: did you mean gpu?"),
        (["--probe", "--gpu", "A100"], "gpu=A100: did you mean A100-"),
        (["--probe", "--output", "x.txt"], "output=x.txt: must end in .json"),
        ([], "site=none: give either a name or --probe"),
        (["generic", "--probe"], "site=generic: give either a name or --probe"),
        (["nowhere"], "site=nowhere: known: "),
    ],
)
def test_a_wrong_question_is_one_line(words: list[str], message: str, far: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["slurm", "site", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_real_slurm_describes_itself(cluster: Daemons, tmp_path: Path) -> None:
    found = probing.probe()
    assert (found.site.partition, found.site.partitions) == ("gpu_p5", ("gpu_p13", "gpu_p5", "gpu_p6", "prepost"))
    other = probing.probe("gpu_p6").cluster  # one card of its type alone
    mixed = probing.probe("gpu_p13")
    assert mixed.site.constraint in ("v100-16g", "v100-32g") and mixed.cluster and mixed.cluster.cores_per_node == 40
    assert mixed.cluster.gpu.name == f"V100-{mixed.site.constraint[5:7]}GB"
    assert other is None or other.gpus_per_node == 4
    assert [file.name for file in found.write(tmp_path / "here.json")][-1] == "here.json"
    assert site(str(tmp_path / "here.json")).partition == "gpu_p5"
