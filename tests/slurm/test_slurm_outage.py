"""On a real SLURM whose controller hangs or has died: what a person asks for is answered within seconds, from files."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, Cluster, one, plan, run_folder
from support import wait_until

from trilane.cli.app import main
from trilane.slurm import jobs, ledger
from trilane.utils.validation import to_mapping


def test_without_the_controller_status_is_the_ledgers_and_nothing_is_submitted_or_cancelled(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A stopped controller accepts connections and answers none: squeue alone would wait a minute."""
    waits, other = (run_folder(tmp_path, plan(name, tmp_path / "data")) for name in ("waits", "other"))
    job = jobs.submit(waits, SITE, REQUEST, ["--begin=now+1hour"])
    site = tmp_path / "test.json"
    site.write_text(json.dumps(to_mapping(SITE)))
    new = ["slurm", "submit", str(other), "--site", str(site), "--account", "xyz@a100"]
    controller = int((Path(cluster.env["LOCAL_SLURM_DIR"]) / "run/slurmctld.pid").read_text().split()[0])
    try:
        for number, says in ((signal.SIGSTOP, "nothing within"), (signal.SIGTERM, "is DOWN")):
            os.kill(controller, number)
            if number == signal.SIGTERM:  # not SIGKILL: it saves a new job within 5 s, and would forget this one
                os.kill(controller, signal.SIGCONT)
                wait_until(lambda: not Path(f"/proc/{controller}").exists(), 30, "the controller ends")
            begin = time.monotonic()
            assert main(["slurm", "status", str(waits), str(other), "--json"]) == 75
            assert time.monotonic() - begin < 5
            found = json.loads(capsys.readouterr().out)
            event = ledger.events(waits, "submitted")[0]
            shown = [(j["id"], j["verdict"], j["as_of"]) for j in found["jobs"]]
            assert shown == [(job, "waiting", event["time"]), ("", "not submitted", "")] and says in found["slurm"]
            for command, claim in ((["slurm", "cancel", str(waits)], "cancelled"), (new, "submitted")):
                assert main(command) == 75
                out, line = capsys.readouterr()
                assert not out and line.count("\n") == 1 and says in line and f"nothing was {claim}" in line
            begin = time.monotonic()
            watch = ["watch", str(waits), "--every", "1", "--seconds", "0.1"]
            for words in (["site", "--probe"], watch):
                assert main(["slurm", *words]) == 75 and says in "".join(capsys.readouterr())
            assert time.monotonic() - begin < 20
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(controller, signal.SIGCONT)
        cluster.start()
    assert one(waits).status == "waiting" and not ledger.events(other)
    assert jobs.cancel([waits]) == [job]
