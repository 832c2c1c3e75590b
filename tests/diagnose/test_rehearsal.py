"""A plan's save and load are rehearsed at tiny width."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parity import machine, rows
from support import REPOSITORY, small_plan

from trilane.cli.app import main
from trilane.config.plan import read_plan
from trilane_diagnose import rehearsal as rehearse
from trilane_diagnose.restart import RestartComparison
from trilane_diagnose.snapshot import RestartFinding


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.label)
def test_a_rehearsal_keeps_the_topology_of_every_plan_of_the_equality_table(
    row: Any, tmp_path: Path
) -> None:
    plan = row.plan(machine(cards=0, bf16=True), str(tmp_path))
    tiny = rehearse.shrink(plan, tmp_path, plan.cluster, 8)
    kept = (
        "tp",
        "pp",
        "dp",
        "zero",
        "interleaving",
        "partition",
        "offload",
        "precision",
        "sequence_parallel",
    )
    assert [getattr(tiny.topology, n) for n in kept] == [getattr(plan.topology, n) for n in kept]
    assert tiny.engine == plan.engine and tiny.shape.parameters <= plan.shape.parameters


def test_a_plan_of_384_gpus_is_refused_here_and_prepared_for_its_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = REPOSITORY / "docs/plan-176b.json"
    plan = read_plan(path)
    t = plan.topology
    assert main(["debug", "rehearse", str(path)]) == 2
    problem = f"trilane: tp x cp x pp={t.tp * t.pp}: one replica has more than the 8 processes of this machine; see --prepare"
    assert capsys.readouterr().err.startswith(problem)
    assert main(["debug", "rehearse", str(path), "--prepare", str(tmp_path / "r")]) == 0
    first = read_plan(tmp_path / "r/first/plan.json")
    second = read_plan(tmp_path / "r/second/plan.json")
    assert first.topology.gpus == t.gpus and first.shape.parameters < 1e8
    assert second.run.load == str(tmp_path / "r/first/checkpoints/iter_0000001")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"srun --ntasks {t.gpus}") and lines[2].startswith(
        "trilane debug restart "
    )
    assert main(["debug", "rehearse", str(path), "--prepare", str(tmp_path / "r")]) == 2


def test_replicas_that_this_machine_has_no_room_for_are_left_out_and_reported(
    tmp_path: Path,
) -> None:
    plan = small_plan()
    plan = replace(plan, topology=replace(plan.topology, tp=2, dp=4, gbs=8))
    made = rehearse.shrink(plan, tmp_path, plan.cluster, 4)
    assert made.topology.dp == 2 and "tp2-pp1-dp2" in rehearse.Rehearsal(plan=made).to_text()


def test_a_rehearsal_that_failed_or_found_a_difference_exits_with_1(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(small_plan().to_json()))
    pair = {"before": tmp_path, "after": tmp_path, "compared": (), "notes": ()}
    differs = RestartFinding(kind="weights", what="differ")
    alike, other = (RestartComparison(**pair, findings=found) for found in ((), (differs,)))
    for how, code in (({"audit": alike}, 0), ({"audit": other}, 1), ({"problem": "crashed"}, 1)):
        done = rehearse.Rehearsal(plan=small_plan(), **how)
        monkeypatch.setattr(rehearse, "rehearse_here", lambda plan, done=done: done)
        assert main(["debug", "rehearse", str(tmp_path / "plan.json"), "--json"]) == code


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted_processes")
def test_a_plan_is_rehearsed_in_processes_of_its_own() -> None:
    """As the command does it; a bug in it would be the planted ones' business."""
    done = rehearse.rehearse_here(small_plan())
    assert not done.problem and done.audit and not done.audit.findings
    assert len(done.audit.compared) == 2
