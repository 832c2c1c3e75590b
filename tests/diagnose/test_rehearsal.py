"""A plan's save and load are rehearsed at tiny width."""

import json
from dataclasses import replace

import pytest
from support import REPOSITORY, small_plan

from trilane.cli.app import main
from trilane.config.plan import read_plan
from trilane_diagnose import rehearsal as rehearse
from trilane_diagnose.restart import RestartComparison
from trilane_diagnose.snapshot import RestartFinding


def test_a_plan_of_384_gpus_is_refused_here_and_prepared_for_its_cluster(tmp_path, capsys):
    path = REPOSITORY / "docs/plan-176b.json"
    topology = read_plan(path).topology
    assert main(["debug", "rehearse", str(path)]) == 2
    problem = f"trilane: tp x cp x pp={topology.tp * topology.pp}: one replica has more than the 8"
    assert capsys.readouterr().err.startswith(problem)
    prepare = ["debug", "rehearse", str(path), "--prepare", str(tmp_path / "r")]
    assert main(prepare) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"srun --ntasks {topology.gpus}")
    assert lines[2].startswith("trilane debug restart ")
    first = read_plan(tmp_path / "r/first/plan.json")
    second = read_plan(tmp_path / "r/second/plan.json")
    assert first.topology == replace(topology, mbs=first.topology.mbs, gbs=first.topology.gbs)
    assert first.shape.parameters < 1e8
    assert second.run.load == str(tmp_path / "r/first/checkpoints/iter_0000001")
    assert main(prepare) == 2, "nothing is overwritten"


def test_a_rehearsal_that_failed_or_found_a_difference_exits_with_1(tmp_path, monkeypatch):
    (tmp_path / "plan.json").write_text(json.dumps(small_plan().to_json()))
    finding = RestartFinding(kind="weights", what="differ")
    alike = RestartComparison(compared=(), findings=(), notes=())
    other = replace(alike, findings=(finding,))
    for audit, problem, code in ((alike, "", 0), (other, "", 1), (None, "crashed", 1)):
        done = rehearse.Rehearsal(plan=small_plan(), audit=audit, problem=problem)
        monkeypatch.setattr(rehearse, "rehearse_here", lambda plan, done=done: done)
        assert main(["debug", "rehearse", str(tmp_path / "plan.json"), "--json"]) == code


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted_processes")
def test_a_plan_is_rehearsed_in_processes_of_its_own():
    """As the command does it; a bug in it would be the planted ones' business."""
    done = rehearse.rehearse_here(small_plan())
    assert not done.problem and done.audit and not done.audit.findings
    assert len(done.audit.compared) == 2
