"""Alerts: each is sent once, in words that cannot do harm; a webhook that does not answer costs nobody time."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from slurm_cluster import fake_commands, plan, run_folder
from webhook_receiver import SECRET, Receiver

from trilane.cli.app import main
from trilane.slurm import client, ledger, monitor
from trilane.slurm.alerting import alerts, delivery, webhook
from trilane.slurm.nodes import node_failure
from trilane.slurm.sites import JobRequest
from trilane.workspace.status import RunStatus, Status, write_status


@pytest.fixture
def server(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Receiver:
    """A receiver to which the environment's webhook goes."""
    monkeypatch.setenv("TRILANE_WEBHOOK", receiver.url)
    monkeypatch.setattr(delivery, "PAUSE_S", 0.01)
    return receiver


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run folder of job 77, which has started."""
    made = run_folder(tmp_path, plan("one", tmp_path / "data", nodes=1, iters=100, save_interval=10))
    ledger.note(made, "submitted", "77", site="test", script="")
    ledger.note(made, "started", "77", nodes="n[1-4]", iteration=0, restarts=0)
    return made


def at(folder: Path, iteration: int) -> None:
    (folder / "steps.jsonl").write_text(f'{{"iteration": {iteration}}}\n')


def saved(folder: Path, iteration: int) -> None:
    (folder / f"checkpoints/iter_{iteration:07d}").mkdir(parents=True)
    (folder / "checkpoints/latest").write_text(f"iter_{iteration:07d}\n")


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """SLURM's state of job 77."""
    known = {"77": "RUNNING"}
    monkeypatch.setattr(client, "is_installed", lambda: True)
    monkeypatch.setattr(
        client, "states", lambda ids: {i: client.JobState(id=i, state=known[i], nodes="n[1-4]") for i in ids}
    )
    return known


def watched(folder: Path, stall_s: float = 600.0) -> list[str]:
    """The lines of one look, its alerts sent."""
    return list(monitor.watch([folder], 60.0, 0.0, stall_s, delivery.sender([folder])))


def test_each_alert_of_a_run_is_sent_once_also_by_another_watch(
    folder: Path, server: Receiver, state: dict[str, str]
) -> None:
    """Failing saves, a stall, a node that died, a requeue, a spare, a death that only SLURM tells of, the end."""
    at(folder, 27)
    saved(folder, 10)
    (folder / "run.log").write_text(
        "trilane: CHECKPOINT NOT SAVED: iter_0000010 could not be saved: an attempt before\n"
        "0: trilane: CHECKPOINT NOT SAVED: iter_0000020 could not be saved: rank 3: No space left; the newest is i\n"
    )
    assert watched(folder)[1:] == [
        "one: CHECKPOINT NOT SAVED: iter_0000020 could not be saved: rank 3: No space left; the newest is i"
    ]
    assert not [text for text in server.texts() if "an attempt before" in text]
    assert any("one: STALLED: no iteration for" in line for line in watched(folder, stall_s=-1.0))
    ledger.note(folder, "ended", "77", status="node failure", evidence="n3 cannot be reached")
    ledger.note(folder, "started", "77", nodes="n[1-2,4-5]", iteration=20, restarts=1)
    watched(folder), watched(folder)
    # started again inside the job: a spare took the place of n4
    ledger.note(folder, "ended", "77", status="crashed", evidence="exit code 1")
    watched(folder)
    ledger.note(folder, "node failure", "77", nodes=["n4"])
    watched(folder)
    ledger.note(folder, "replaced", "77", nodes=["n4"], iteration=27)
    ledger.note(folder, "started", "77", nodes="n[1-2,4-5]", iteration=20, restarts=1)
    watched(folder), watched(folder)
    state["77"] = "TIMEOUT"
    watched(folder), watched(folder)
    ledger.note(folder, "submitted", "78", site="test", script="")
    ledger.note(folder, "started", "78", nodes="n[1-2,4-5]", iteration=20, restarts=0)
    ledger.note(folder, "ended", "78", status="completed", evidence="iteration 100 of 100")
    state["78"] = "COMPLETED"
    at(folder, 100), saved(folder, 100)
    watched(folder), watched(folder)
    kinds = [body["kind"] for body in server.bodies]
    assert kinds == ["checkpoint not saved", "stalled", "died", "requeued", "replaced", "died", "finished"]
    assert "n3 cannot be reached" in server.texts()[2] and "from iteration 20 on n[1-2,4-5]" in server.texts()[3]
    assert "lost n4 after iteration 27" in server.texts()[4]
    assert "time limit" in server.texts()[5] and {body["job"] for body in server.bodies} == {"77", "78"}
    assert SECRET not in (folder / "jobs.jsonl").read_text() and "token" not in (folder / "jobs.jsonl").read_text()


def test_what_a_watch_notes_does_not_hide_from_the_job_that_a_spare_takes_over(folder: Path, server: Receiver) -> None:
    """The job asks for its last event, and a watch may note an alert in between."""
    ledger.note(folder, "replaced", "77", nodes=["n4"], iteration=27)
    assert main(["slurm", "alert", str(folder)]) == 0 and len(server.bodies) == 1
    assert node_failure.goes_on(folder, "77") and ledger.events(folder)[-1]["event"] == "replaced"


def test_a_save_that_is_overdue_is_reported_though_no_line_tells_of_it(folder: Path) -> None:
    """Every 10 iterations: at 29 the save of 20 may be going on; at 30 it has ended or failed."""
    saved(folder, 10)
    check = alerts.SaveCheck(folder)
    assert check.failed("77", 29) == []
    assert [a.key for a in check.failed("77", 30)] == ["unsaved:20"]
    saved(folder, 20)
    assert check.failed("77", 39) == []


def test_a_log_of_gigabytes_is_read_by_what_is_new_at_its_end(folder: Path) -> None:
    line = b"trilane: CHECKPOINT NOT SAVED: iter_%07d could not be saved: No space left\n"
    with (folder / "run.log").open("wb") as log:
        log.truncate(3 << 30)
        log.seek(0, 2)
        log.write(b"\n" + line % 20)
    saved(folder, 10)
    check, begin = alerts.SaveCheck(folder), time.perf_counter()
    assert [a.key for a in check.failed("77", 21)] == ["unsaved:20"]
    assert check.failed("77", 21) == []
    with (folder / "run.log").open("ab") as log:
        log.write(line[:30])
        log.flush()
        assert check.failed("77", 31)[1:] == []
        log.write(line[30:] % 30)
    assert [a.key for a in check.failed("77", 31)] == ["unsaved:20", "unsaved:30"]
    assert time.perf_counter() - begin < 1.0


def test_what_a_log_says_can_neither_command_slack_nor_a_terminal_nor_fill_a_screen(
    folder: Path, server: Receiver
) -> None:
    said = "<!channel> <http://evil|click> & \x1b[2J\u202e\r\n" + "x" * 5000
    ledger.note(folder, "ended", "77", status="crashed", evidence=said)
    assert main(["slurm", "alert", str(folder)]) == 0
    (text,) = server.texts()
    assert "&lt;!channel&gt; &lt;http://evil|click&gt; &amp;" in text and "<" not in text
    assert text.isprintable() and len(text) < 700


@pytest.mark.parametrize("answer", [500, 302, "hang", "drip", "nonsense", "refuse"])
def test_a_webhook_that_does_not_answer_never_holds_up_and_is_named_without_its_secret(
    answer: int | str, folder: Path, server: Receiver, state: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tries, then none for a minute; the run's line at once, one line of the problem, no redirect is followed."""
    monkeypatch.setattr(webhook, "TRY_S", 0.3)
    server.answer = answer
    if answer == "refuse":
        monkeypatch.setenv("TRILANE_WEBHOOK", f"http://127.0.0.1:9/{SECRET}")
    ledger.note(folder, "ended", "77", status="crashed", evidence="Segmentation fault")
    state["77"] = "FAILED"
    lines, begin = monitor.watch([folder], 0.01, 0.2, 600.0, delivery.sender([folder])), time.monotonic()
    assert next(lines) and time.monotonic() - begin < 0.25
    problems = list(lines)
    assert len(problems) == 1 and problems[0].startswith("alert 'died' of one: the webhook at http://127.0.0.1:")
    assert time.monotonic() - begin < 2
    recorded = ledger.events(folder, "alerted")
    assert [e["state"] for e in recorded] == ["sending", "failed"] and len(server.bodies) in (0, 2)
    assert SECRET not in problems[0] + json.dumps(recorded)
    server.answer = 200
    watched(folder)
    assert len(ledger.events(folder, "alerted")) == 2, "it was tried again too early"
    monkeypatch.setattr(delivery, "AGAIN_S", (0.0, 0.0))
    if answer != "refuse":
        watched(folder)
        assert ledger.events(folder, "alerted")[-1]["state"] == "sent"


def test_a_webhook_that_stays_away_is_tried_a_bounded_number_of_times(
    folder: Path, server: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "AGAIN_S", (0.0, 0.0))
    server.answer = 500
    ledger.note(folder, "ended", "77", status="crashed", evidence="Segmentation fault")
    assert [main(["slurm", "alert", str(folder)]) for _ in range(5)] == [1, 1, 1, 0, 0]
    assert len(server.bodies) == 6 and {body["kind"] for body in server.bodies} == {"died"}


def test_of_two_processes_at_the_same_time_one_sends(folder: Path, server: Receiver) -> None:
    ledger.note(folder, "ended", "77", status="crashed", evidence="Segmentation fault")
    senders = [delivery.sender([folder]) for _ in range(4)]
    for sender in senders:
        sender.offer(folder, alerts.recorded(folder))
    assert [sender.close() for sender in senders] == [[]] * 4
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "TRILANE_WEBHOOK=(not shown): must be an http or https URL without blanks"),
        ("file:///etc/passwd", "TRILANE_WEBHOOK=(not shown): must be an http or https URL without blanks"),
        ("https:///SECRET", "TRILANE_WEBHOOK=(not shown): must be an http or https URL without blanks"),
        ("https://host/SE\nCRET", "TRILANE_WEBHOOK=(not shown): must be an http or https URL without blanks"),
        ("https://host:99999999/SECRET", "TRILANE_WEBHOOK=(not shown): must be an http or https URL without blanks"),
        ("https://[host/SECRET", "TRILANE_WEBHOOK=(not shown): must be an http or https URL without blanks"),
        ("https://me:SECRET@host/x", "TRILANE_WEBHOOK=https://host/...: must hold no user name or password"),
    ],
)
def test_a_url_that_is_none_is_one_line_without_it(
    url: str, message: str, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRILANE_WEBHOOK", url)
    assert main(["slurm", "watch", str(folder)]) == 2
    assert capsys.readouterr().err == f"trilane: {message}\n"


def test_a_webhook_is_tried_out_by_the_command_alone(
    server: Receiver, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    assert main(["slurm", "alert"]) == 0
    assert server.bodies[0]["kind"] == "test" and SECRET not in capsys.readouterr().out
    server.answer = 403
    assert main(["slurm", "alert"]) == 1 and "answered 403" in capsys.readouterr().out
    monkeypatch.delenv("TRILANE_WEBHOOK")
    assert main(["slurm", "alert"]) == 2


def test_mail_goes_to_who_asked_for_it_where_the_host_has_a_mail_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, str]
) -> None:
    monkeypatch.delenv("TRILANE_WEBHOOK", raising=False)
    request = JobRequest(account="xyz@a100", mail="me@lab.org")
    folder = run_folder(tmp_path, plan("one", tmp_path / "data", nodes=1), request)
    ledger.note(folder, "submitted", "77", site="test", script="")
    said = "~!rm\nBcc: all@lab.org\n\nSegmentation fault"
    ledger.note(folder, "ended", "77", status="crashed", evidence=said)
    write_status(folder, RunStatus(status=Status.CRASHED, evidence=said, rank=None, exit_code=1, seconds=1.0))
    state["77"] = "FAILED"
    programs = fake_commands(tmp_path, monkeypatch)
    (programs / "sendmail").write_text(f'#!/bin/sh\n{{ echo "$@"; cat; }} >>{tmp_path}/mail\n')
    (programs / "sendmail").chmod(0o755)
    assert watched(folder)[0].startswith("one: job 77 FAILED")
    lines = (tmp_path / "mail").read_text().splitlines()
    assert lines[:4] == ["-i me@lab.org", "To: me@lab.org", "Subject: trilane: one: died", ""]
    assert len(lines) == 5 and lines[4].startswith("trilane: one: DIED: job 77: crashed: ~!rm Bcc: all@lab.org")


@pytest.mark.parametrize("address", ["-Xfile", "/etc/passwd", "|sh", "a b", "a@b@c", ""])
def test_an_edited_script_cannot_mail_into_a_file_or_a_program(address: str, folder: Path) -> None:
    (folder / "job.sbatch").write_text(f"#!/bin/bash\n#SBATCH --mail-user='{address}'\n")
    assert delivery.addresses([folder]) == {}


def test_a_job_sends_its_alerts_without_waiting_and_none_where_its_nodes_have_no_internet(
    folder: Path, server: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    delivery.send_apart(folder)
    assert started == [], "nothing has happened"
    ledger.note(folder, "started", "77", nodes="n[1-4]", iteration=0, restarts=1)
    delivery.send_apart(folder, {"TRILANE_WEBHOOK": "http://x/y", "HF_HUB_OFFLINE": "1"})
    assert started == []
    delivery.send_apart(folder)
    (command,) = started
    assert command[-5:] == ["-m", "trilane", "slurm", "alert", str(folder)], "and no URL in the process list"
    assert main(command[-3:]) == 0 and server.bodies[0]["kind"] == "requeued"


def test_what_happened_long_ago_is_no_news(folder: Path, server: Receiver, state: dict[str, str]) -> None:
    old = {"event": "ended", "id": "77", "time": "2026-01-01T00:00:00+00:00", "status": "crashed", "evidence": "x"}
    (folder / "jobs.jsonl").write_text(
        json.dumps({**old, "event": "submitted", "site": "test", "script": ""}) + "\n" + json.dumps(old) + "\n"
    )
    state["77"] = "FAILED"
    watched(folder)
    assert server.bodies == []
