"""The sbatch script: recorded whole, accepted by bash and shellcheck, closed to hostile values."""

import subprocess
import sys
from pathlib import Path

import pytest

from trilane import slurm
from trilane.hardware import cluster
from trilane.plan import Plan
from trilane.shape import parse_shape
from trilane.topology import Topology

GOLDEN = Path(__file__).parent / "golden"


def script(monkeypatch, **changes):
    monkeypatch.setattr(slurm, "REPOSITORY", Path("/home/me/trilane"))
    topology = Topology(tp=4, pp=12, dp=8, mbs=2, gbs=2048, precision="bf16", partition="type:transformer|embedding")
    plan = Plan(
        label="bloom", shape=parse_shape("70,14336,112,2048,250880"), cluster=cluster("jz-a100-80g"), topology=topology
    )
    return slurm.render(plan, **{"account": "xyz@a100", "constraint": "a100", **changes})


def test_the_script_for_384_gpus_is_the_recorded_one(monkeypatch):
    assert script(monkeypatch) == (GOLDEN / "train-jz-a100-80g.sbatch").read_text()


def test_bash_and_shellcheck_accept_the_recorded_scripts():
    for path in GOLDEN.glob("*.sbatch"):
        subprocess.run(["bash", "-n", path], check=True)
        checked = subprocess.run(
            [Path(sys.executable).with_name("shellcheck"), "--exclude=SC1091", path], capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    "value", ["a b", "$(id)", "`id`", "x;id", "x\n#SBATCH --time=9", "-x", "x'y", 'x"y', "x|y", "${A}", "", "é"]
)
@pytest.mark.parametrize("field", ["account", "constraint", "time_limit"])
def test_a_value_that_bash_would_read_twice_is_refused(monkeypatch, field, value):
    with pytest.raises(ValueError, match=f"^{field}="):
        script(monkeypatch, **{field: value})
