"""Watching runs: what a person should know is sent once; a webhook that does not answer holds nobody up."""

import time
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
from slurm_cluster import plan, run_folder
from webhook_receiver import SECRET, Receiver

from trilane.cli.app import main
from trilane.slurm import client, jobs, ledger, monitor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run folder of job 77, which has started."""
    made = run_folder(tmp_path, plan("one", tmp_path / "data", nodes=1, iters=100, save_interval=10))
    ledger.note(made, "submitted", "77", site="test", script="")
    ledger.note(made, "started", "77", nodes="n[1-4]", iteration=0, restarts=0)
    return made


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """SLURM's state of job 77."""
    known = {"77": "RUNNING"}

    def states(ids: Iterable[str], names: Collection[str] = ()) -> dict[str, client.JobState]:
        return {i: client.JobState(id=i, state=known[i], nodes="n[1-4]") for i in ids}

    for name, value in (("is_installed", lambda: True), ("require_answer", lambda: None), ("states", states)):
        monkeypatch.setattr(client, name, value)
    return known


def test_a_watch_sends_what_a_person_should_know_once(
    folder: Path, receiver: Receiver, state: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death that only SLURM reports."""
    monkeypatch.setenv(monitor.WEBHOOK, receiver.url)
    lines = monitor.watch([folder], 0.01, 60.0)
    assert next(lines).startswith("one: job 77 RUNNING n[1-4]: running")
    (folder / "steps.jsonl").write_text('{"iteration": 30}\n')
    assert next(lines) == "one: iteration 30 of 100"
    state["77"] = "TIMEOUT"
    assert list(lines) == ["one: job 77 TIMEOUT n[1-4]: DIED: time limit SLURM: TIMEOUT"]
    kinds = [body["kind"] for body in receiver.bodies]
    assert kinds == ["died"]
    assert {(body["run"], body["job"]) for body in receiver.bodies} == {("one", "77")}


@pytest.mark.parametrize("answer", [200, 500, "hang", "refuse"])
def test_an_alert_that_fails_shows_no_secret_and_no_log_commands_slack(
    answer: int | str, receiver: Receiver, folder: Path, state: dict[str, str]
) -> None:
    receiver.answer, begin = answer, time.monotonic()
    url, said = (
        f"http://127.0.0.1:9/{SECRET}" if answer == "refuse" else receiver.url,
        "<!channel> & \u202e" + "x" * 5000,
    )
    problem = monitor.post(url, "died", jobs.job_status([folder])[0], said, within_s=0.3)
    assert time.monotonic() - begin < 2 and SECRET not in problem and "127.0.0.1" not in problem
    assert problem.startswith("" if answer == 200 else "alert 'died' of one not sent: ") and bool(problem) is (
        answer != 200
    )
    for text in receiver.texts():
        assert text.startswith("&lt;!channel&gt; &amp;") and text.isprintable() and len(text) < 700


def test_a_url_that_is_none_is_one_line_without_it(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(monitor.WEBHOOK, "ftp://host/SECRET")
    assert main(["slurm", "watch", str(folder)]) == 2
    assert capsys.readouterr().err == "trilane: TRILANE_WEBHOOK=(not shown): must be an http or https URL\n"
