"""A site read off SLURM: of texts as sites print them, hostile ones too; what is not known is left out and listed."""

import stat
from pathlib import Path

import pytest
from slurm_cluster import Cluster, fake_commands

from trilane.cli.app import main
from trilane.slurm.sites import gpus_of, probe, site

# As sinfo prints them: typed GPUs bound to sockets, two kinds of nodes in one partition, a partition that is down, and
# a line that a command of the site itself adds.
SINFO = """
site notice: maintenance on Friday
gpu*|up|1-00:00:00|90|2:64:2|515000|gpu:a100:4(S:0,1),nvme:1
gpu*|up|1-00:00:00|10|2:64:2|515000|gpu:a100:4(S:0-1)
cpu|up|infinite|500|2:64:2|257000|(null)
old|down|infinite|5|2:8:1|64000|gpu:k80:2
$(touch x)|up|infinite|1|1:1:1|1000|gpu:2
"""
CONFIG = "Configuration data as of now\nClusterName             = far\n"


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands of a cluster elsewhere."""
    place = fake_commands(tmp_path, monkeypatch)
    for name, text in {"sinfo": SINFO, "scontrol": CONFIG}.items():
        (place / name).write_text(f'#!/bin/bash\ncat <<"END"\n{text}END\n')
        (place / name).chmod(stat.S_IRWXU)
    return place


def test_a_site_is_what_slurm_reports_and_the_rest_is_listed(
    far: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["slurm", "site", "--probe"]) == 0
    out, listed = capsys.readouterr()
    (tmp_path / "far.json").write_text(out)
    found = site(str(tmp_path / "far.json"))
    assert (found.name, found.partition, found.partitions) == ("far-gpu", "gpu", ("gpu", "cpu"))
    assert (found.gpu_type, found.constraint, found.cluster, found.qos) == ("a100", "", "", ())
    has = "gpu has 90 nodes of 4 GPUs (a100), 128 cores and 540 GB, for 24 h"
    for word in (has, "modules", "offline", "qos"):
        assert word in found.sources["unknown"] and word in listed, word
    assert not (tmp_path / "x").exists()


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
        ([], "site=none: give either a name or --probe"),
        (["generic", "--probe"], "site=generic: give either a name or --probe"),
        (["nowhere"], "site=nowhere: known: "),
    ],
)
def test_a_wrong_question_is_one_line(words: list[str], message: str, far: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["slurm", "site", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_real_slurm_describes_itself(cluster: Cluster) -> None:
    found, unknown = probe()
    assert (found.partition, found.partitions) == ("gpu_p5", ("gpu_p13", "gpu_p5", "gpu_p6", "prepost"))
    assert "gpu_p5 has 52 nodes of 8 GPUs (no type), 64 cores" in unknown[0]
