"""The runs of a study before they are launched, as 03_launch shows them."""

from dataclasses import replace
from pathlib import Path

from test_preflight import plan

from trilane.slurm.sites import JobRequest, site
from trilane.slurm.study_runs import StudyRun, StudyRuns
from trilane.workspace.study import Study


def test_a_finding_of_several_plans_is_one_row_that_names_them(outputs: Path) -> None:
    study, small = Study.create("s"), plan()
    rows = []
    for label, seed in (("a", 1), ("b", 2)):
        each = replace(small, label=label, run=replace(small.run, seed=seed))
        folder, _ = study.run_folder(each, {"plan.json": "{}"})
        rows.append(StudyRun(plan=each, prediction={}, reason="", folder=folder, is_completed=False))
    request = JobRequest(account="", time_limit="02:00:00", qos="")
    shown = StudyRuns(study=study, site=site("jean-zay-a100"), request=request, rows=tuple(rows)).check().to_frame()
    assert not shown.duplicated(["level", "rule", "finding", "remedy"]).any()
    assert set(shown["plans"]) <= {"all", "a", "b"} and "all" in set(shown["plans"])
    alone = StudyRuns(study=study, site=site("jean-zay-a100"), request=request, rows=(rows[0],)).check().to_frame()
    assert set(alone["plans"]) == {"a"}
