"""Sweeps: one array for each shape of a job, of plans in any form that a search writes."""

from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, plan

from trilane.slurm import sweep


def test_plans_of_different_sizes_become_one_array_a_size(tmp_path: Path) -> None:
    sizes = {"half": (1, 1), "node": (1, 2), "two": (2, 4), "other": (2, 4)}
    plans = [plan(label, tmp_path / "d", nodes=n, dp=dp, gbs=16).to_json() for label, (n, dp) in sizes.items()]
    sweep.create(tmp_path / "sweep", plans, SITE, REQUEST)
    scripts = {path.name: path.read_text() for path in (tmp_path / "sweep").glob("*.sbatch")}
    arrays = {name: next(line for line in text.splitlines() if "--array" in line) for name, text in scripts.items()}
    wanted = {"1x1": "1", "1x2": "2", "2x2": "3,4"}
    assert arrays == {f"sweep-{shape}.sbatch": f"#SBATCH --array={lines}%4" for shape, lines in wanted.items()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", r"^plans=.*: must be a list of plans"),
        ("[]", r"^plans=.*: must be a list of plans"),
        ('[{"label": "x"}]', r"^plan.shape=missing: is required$"),
        ("[", r"^plans=.*: not JSON"),
    ],
)
def test_a_bad_table_of_plans_is_one_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plans.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        sweep.create(tmp_path / "sweep", sweep.read_plans(tmp_path / "plans.json"), SITE, REQUEST)


def test_nothing_that_exists_is_swept_over(tmp_path: Path) -> None:
    plans = [plan("one", tmp_path / "d", nodes=1).to_json()]
    with pytest.raises(ValueError, match=r"^label=one: must be unique in a sweep$"):
        sweep.create(tmp_path / "sweep", plans * 2, SITE, REQUEST)
    sweep.create(tmp_path / "sweep", plans, SITE, REQUEST)
    with pytest.raises(ValueError, match=r"^sweep=.*: holds a sweep already; take a new folder$"):
        sweep.create(tmp_path / "sweep", plans, SITE, REQUEST)
    with pytest.raises(ValueError, match=r"^sweep=.*: is not the folder of a sweep$"):
        sweep.submit(tmp_path, SITE, 1)
