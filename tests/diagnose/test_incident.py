"""An incident is one timeline and one verdict, of whatever files a folder has; what they do not
show is said.
"""

import json
from pathlib import Path
from random import Random

import pytest
from plants import data_loader, write

from trilane.cli.app import main
from trilane.workspace.status import RunStatus, Status, write_status
from trilane_diagnose.incident import read_incident

STEP = " [2026-11-27 15:34:{:02}] iteration {:8}/ 100 | elapsed time per iteration (ms): 281.6 | lm loss: 6.24E+00 |\n"
WATCHDOG = "[rank7]:[E1127 15:44:02.123 ProcessGroupNCCL.cpp:616] [Rank 7] Watchdog caught collective operation timeout: "
WATCHDOG += "WorkNCCL(SeqNum=81, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600001 ms\n"
HEAD = "JobID|State|End|ExitCode|NodeList\n"


@pytest.mark.parametrize(
    ("printed", "accounting", "verdict"),
    [
        (
            "srun: error: gpu3: task 3: Killed\n",
            "7.0|OUT_OF_MEMORY|{0}|0:125|gpu3\n7|OUT_OF_MEMORY|{0}|0:125|gpu[1-4]\n",
            "host memory: job 7.0",
        ),
        ("", "7|TIMEOUT|{0}|0:0|gpu[1-4]\n", "time limit: job 7: TIMEOUT"),
        ("[rank12]: ValueError: bad\n", "7|CANCELLED by 1000|{0}|0:0|gpu3\n", "crashed on rank 12"),
        ("[rank12]: ValueError: bad\n", "", "crashed on rank 12"),
        ("", "6|TIMEOUT|{0}|0:0|gpu1\n10|NODE_FAIL|{0}|1:0|gpu4\n", "node failure: job 10"),
        ("", "", "cannot be determined from these files"),
    ],
)
def test_of_copied_files_the_reason_is_found(
    printed: str, accounting: str, verdict: str, tmp_path: Path
) -> None:
    """SLURM's CANCELLED is no reason where a rank failed; of its steps the one that ran out of
    memory has the node.
    """
    log = (
        STEP.format(1, 1)
        + STEP.format(2, 2)
        + "[rank12]: Traceback (most recent call last):\n" * printed.startswith("[")
        + printed
    )
    (tmp_path / "job.out").write_text(log)
    (tmp_path / "accounting.txt").write_text(HEAD + accounting.format("2026-11-27T15:34:01"))
    found = read_incident(tmp_path)
    assert found.verdict[0].startswith(verdict), found.to_text()
    assert any("between sources the order is not proved" in note for note in found.notes) is bool(
        accounting
    )
    assert sorted(times := [e.at for e in found.events if e.at == e.at]) == times


def test_what_the_run_recorded_of_its_failure_is_the_reason_of_who_cancelled_the_job(
    tmp_path: Path,
) -> None:
    write_status(
        tmp_path,
        RunStatus(status=Status.CRASHED, evidence="rank 3: x", rank=3, exit_code=1, seconds=9.0),
    )
    (tmp_path / "run.log").write_text(STEP.format(1, 1))
    (tmp_path / "accounting.txt").write_text(
        HEAD + "7|CANCELLED by 1000|2026-11-27T15:34:01|0:0|gpu3\n"
    )
    assert read_incident(tmp_path).verdict[0] == "crashed on rank 3: rank 3: x"


def test_a_hang_of_384_ranks_is_joined_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text of a log is no markup of the page; a line without a clock stands behind the one
    before it.
    """
    scene = data_loader(Random(1))
    write(tmp_path / "copied", scene)
    (guilty,) = scene.guilty
    own = "NOT FINITE since iteration 2: <script>alert(1)</script>\x1b[31m\n"
    (tmp_path / "copied/train.log").write_text(STEP.format(1, 1) + own + WATCHDOG)
    assert (
        main(
            [
                "debug",
                "incident",
                str(tmp_path / "copied"),
                "--page",
                str(tmp_path / "page.html"),
                "--json",
            ]
        )
        == 0
    )
    found, page = json.loads(capsys.readouterr().out), (tmp_path / "page.html").read_text()
    assert found["hang"]["suspects"] == [guilty] and "cannot be determined" not in " ".join(
        found["verdict"]
    )
    assert found["status"] == "hang" and "on rank 7" not in found["verdict"][0], "it only waited"
    assert [guilty] in [event["ranks"] for event in found["events"] if event["source"] == "stacks"]
    assert "&lt;script&gt;" in page and "<script>alert" not in page and "\x1b" not in page


def test_where_log_and_stacks_name_other_ranks_none_is_blamed(tmp_path: Path) -> None:
    write(tmp_path / "copied", scene := data_loader(Random(1)))
    other = (min(scene.guilty) + 1) % 8
    (tmp_path / "copied/train.log").write_text(
        STEP.format(1, 1) + f"Traceback (most recent call last):\n[rank{other}]: ValueError: x\n"
    )
    assert "which began it cannot be determined" in read_incident(tmp_path / "copied").verdict[-1]


def test_a_run_that_completed_had_no_incident_and_an_empty_folder_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.log").write_text("".join(STEP.format(n, n + 90) for n in range(1, 11)))
    assert read_incident(tmp_path).verdict[0].startswith("nothing happened: completed")
    (tmp_path / "run.log").write_text("")
    assert main(["debug", "incident", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
