"""On a real SLURM: a node that is really slower than the others, and one whose GPU reports that its memory is worn."""

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import PATIENCE_S, REQUEST, Cluster, ended, plan, run_folder, says
from support import wait_until

from trilane.slurm import client, ledger

# Fails where the node is in the file `worn`; of the queries it answers one, as an old nvidia-smi does.
NVIDIA_SMI = r"""#!/bin/bash
[[ $1 == --query-remapped-rows=* ]] || exit 2
echo "00000000:07:00.0, 0, $(grep -cx "$(hostname)" %s)"
"""


def is_measuring(process: Path, node: str) -> bool:
    """Whether this is the test of the node, past the import of torch: its process group has threads."""
    with suppress(OSError):
        if b"trilane.engine.bench.node_test\0alone" in (process / "cmdline").read_bytes():
            threads = (process / "status").read_text().partition("Threads:")[2].split()[0]
            return int(threads) >= 4 and f"SLURMD_NODENAME={node}\0".encode() in (process / "environ").read_bytes()
    return False


def slow_down(node: str, stop: threading.Event) -> None:
    """Let the test of the node measure for a sixteenth of the time: within its limit on a loaded machine too."""
    while not stop.wait(0.05):
        for process in [process for process in Path("/proc").glob("[0-9]*") if is_measuring(process, node)]:
            with suppress(ProcessLookupError):
                while not stop.wait(0.01):
                    os.kill(int(process.name), signal.SIGSTOP)
                    time.sleep(0.15)
                    os.kill(int(process.name), signal.SIGCONT)


def only_choose(folder: Path) -> None:
    """End the script once it has chosen its nodes, which it prints."""
    script = (folder / "job.sbatch").read_text()
    head, choice, _ = script.partition("  TRAIN_NODELIST=$(")
    command = script[len(head) :].splitlines()[0]
    end = '\n  echo "chosen: $TRAIN_NODELIST"\n  exit 0\ndone\n'
    assert choice
    (folder / "job.sbatch").write_text(head.replace("python -m trilane slurm job guard . &", ":") + command + end)


def one_core(folder: Path, spares: int) -> Path:
    """The run folder of a plan on two nodes of one process each, whose script only chooses its nodes."""
    p = plan(f"spare{spares}", folder / "data")
    p = replace(p, cluster=replace(p.cluster, gpus_per_node=1, cores_per_node=1), topology=replace(p.topology, dp=2))
    made = run_folder(folder, p, replace(REQUEST, spares=spares, preflight=True))
    only_choose(made)
    return made


@pytest.fixture
def worn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the names of the nodes whose nvidia-smi reports a failure."""
    (tmp_path / "bin").mkdir()
    tool, names = tmp_path / "bin/nvidia-smi", tmp_path / "worn"
    tool.write_text(NVIDIA_SMI % names)
    tool.chmod(0o755)
    names.touch()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return names


def test_a_slow_and_a_broken_node_stay_out_and_without_spares_a_broken_one_sends_the_job_elsewhere(
    cluster: Cluster, worn: Path, tmp_path: Path
) -> None:
    worn.write_text("jz-a100-2\njz-a100-5\n")
    folder, other = one_core(tmp_path, spares=2), one_core(tmp_path, spares=0)
    stop = threading.Event()
    slow = threading.Thread(target=slow_down, args=("jz-a100-3", stop))
    slow.start()
    try:
        client.sbatch(folder / "job.sbatch", "--nodelist=jz-a100-[1-4]")
        wait_until(lambda: "chosen: " in says(folder), PATIENCE_S, "no choice")
    finally:
        stop.set()
        slow.join()
    (choice,) = ledger.events(folder, "nodes")
    assert choice["chosen"] == ["jz-a100-1", "jz-a100-4"], says(folder)
    assert choice["left_out"]["jz-a100-2"] == "GPU 00000000:07:00.0: its memory has no rows left to remap"
    assert "% of the median" in choice["left_out"]["jz-a100-3"]
    assert [e["nodes"] for e in ledger.events(folder, "node failure")] == [["jz-a100-2"]], "not the slow one"
    assert "NODE jz-a100-2 is left out: GPU" in (folder / "run.log").read_text()
    ended(folder)
    busy = "--exclude=jz-a100-[1-4,7-52]"
    job = client.sbatch(other / "job.sbatch", busy)
    wait_until(lambda: bool(ledger.events(other, "ended")), PATIENCE_S, says(other))
    wait_until(lambda: client.states([job])[job].state == "PENDING", PATIENCE_S, says(other))
    found = ledger.events(other, "ended")[0]
    assert found["status"] == "node failure" and "jz-a100-5: GPU 00000000:07:00.0" in found["evidence"]
    wait_until(lambda: "jz-a100-5" in avoided(job), PATIENCE_S, f"the job avoids {avoided(job)}")
    client.cancel([job])


def avoided(job: str) -> list[str]:
    """The nodes that a job avoids, which is set once it is in the queue again."""
    return client.hostnames(client.call(["scontrol", "show", "job", job]).split("ExcNodeList=")[1].split()[0])


def is_guarded(folder: Path) -> bool:
    """Whether the guard of the job in that run folder runs, on whichever node: all are this machine."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            program, *words = (process / "cmdline").read_bytes().split(b"\0")
            if not program.endswith(b"srun") and b"--here" in words and (process / "cwd").samefile(folder):
                return True
    return False


def test_a_job_that_loses_its_first_node_goes_back_into_the_queue_for_all_its_nodes(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The script runs there. Under --no-kill SLURM lets such a job hold its other nodes until its time limit."""
    p = replace(plan("first", tmp_path / "data"), topology=replace(plan("first", tmp_path).topology, dp=4))
    folder = run_folder(tmp_path, p, replace(REQUEST, spares=1))
    script = (folder / "job.sbatch").read_text().replace("job guard .", "job guard . --every 1")
    head, _, _ = script.partition("    exec python -m trilane.engine.torchrun")
    (folder / "job.sbatch").write_text(f"{head}    sleep 600'\nexit\ndone\n")
    job = client.sbatch(folder / "job.sbatch")
    # SLURM lists a step before its process runs; one whose srun dies in between never does
    wait_until(lambda: is_guarded(folder), PATIENCE_S, says(folder))
    first = client.hostnames(client.states([job])[job].nodes)[0]
    cluster.do("kill-node", first)
    client.call(["scontrol", "update", f"NodeName={first}", "State=DOWN", "Reason=killed"])
    wait_until(lambda: len(ledger.events(folder, "started")) == 2, PATIENCE_S, says(folder))
    assert [e["nodes"] for e in ledger.events(folder, "node failure")] == [[first]]
    now = client.hostnames(client.states([job])[job].nodes)
    assert len(now) == 3 and first not in now
    client.cancel([job])
