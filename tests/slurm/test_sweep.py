"""Sweeps: run folders of plans in any form that a search writes."""

import pytest
from slurm_cluster import REQUEST, SITE, plan

from trilane.slurm import study_runs


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", r"^plans=.*: must be a list of plans"),
        ('[{"label": "x"}]', r"^plan.shape=missing: is required$"),
        ("[", r"^plans=.*: not JSON"),
    ],
)
def test_a_bad_table_of_plans_is_one_line(content: str, message: str, tmp_path):
    (tmp_path / "plans.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        study_runs.create_sweep(
            tmp_path / "sweep", study_runs.read_plans(tmp_path / "plans.json"), SITE, REQUEST
        )


def test_nothing_that_exists_is_swept_over(tmp_path):
    plans = [plan(label, tmp_path / "d", nodes=1).to_json() for label in ("one", "two")]
    with pytest.raises(ValueError, match=r"^label=one: must be unique in a sweep$"):
        study_runs.create_sweep(tmp_path / "sweep", plans[:1] * 2, SITE, REQUEST)
    assert not (tmp_path / "sweep").exists()
    (made,) = study_runs.create_sweep(tmp_path / "sweep", plans[:1], SITE, REQUEST)
    assert made == tmp_path / "sweep/runs/one" and (made / "job.sbatch").exists()
    with pytest.raises(ValueError, match=r"^run folder=.*/one: exists; take a new one$"):
        study_runs.create_sweep(tmp_path / "sweep", plans[::-1], SITE, REQUEST)
    assert not (tmp_path / "sweep/runs/two").exists()
