"""Watching runs: a line for each change."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
from slurm_cluster import plan, run_folder

from trilane.slurm import client, jobs, ledger
from trilane.workspace import storage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run folder of job 77, which has started."""
    made = run_folder(
        tmp_path, plan("one", tmp_path / "data", nodes=1, iters=100, save_interval=10)
    )
    ledger.note(made, "submitted", "77", site="test", script="")
    ledger.note(made, "started", "77", nodes="n[1-4]", iteration=0, restarts=0)
    return made


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """SLURM's state of job 77."""
    known = {"77": "RUNNING"}

    def states(ids: Iterable[str], names: Collection[str] = ()) -> dict[str, client.JobState]:
        return {i: client.JobState(id=i, state=known[i], nodes="n[1-4]") for i in ids}

    for name, value in (
        ("is_installed", lambda: True),
        ("require_answer", lambda: None),
        ("states", states),
    ):
        monkeypatch.setattr(client, name, value)
    return known


def test_a_watch_prints_each_change_once(folder: Path, state: dict[str, str]) -> None:
    """A death that only SLURM reports."""
    lines = jobs.watch([folder], 0.01, 60.0)
    assert next(lines).startswith("one: job 77 RUNNING n[1-4]: running")
    (folder / "steps.jsonl").write_text('{"iteration": 30}\n')
    assert next(lines) == "one: iteration 30 of 100"
    (folder / "ranks").mkdir(exist_ok=True)
    storage.note(
        folder, "CHECKPOINT NOT SAVED: iter_0000030 could not be saved: Read-only file system"
    )
    since = r"one: CHECKPOINT NOT SAVED since 20\S+: iter_0000030 could not be saved: Read-only file system"
    assert re.fullmatch(since, next(lines))
    (folder / "run.log").write_text("trilane: saved checkpoints/iter_0000040\n")
    storage.note(folder, "")
    assert next(lines) == "one: trilane: saved checkpoints/iter_0000040"
    state["77"] = "TIMEOUT"
    (line,) = lines
    assert line.startswith(
        "one: job 77 TIMEOUT n[1-4]: DIED: time limit SLURM: TIMEOUT; `trilane slurm submit "
    )
