"""The other templates on a real SLURM: a shell on two nodes, a watcher that submits itself again."""

import contextlib
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

from slurm_cluster import REQUEST, SCRIPT, SITE, Cluster, plan, run_folder
from support import wait_until

from trilane.slurm import client, jobs, script


def test_the_interactive_script_gives_a_shell_on_two_nodes_that_knows_how_to_train(
    cluster: Cluster, tmp_path: Path
) -> None:
    """At a terminal, as on a login node."""
    p = plan("shell", tmp_path.parent / "data")
    path = tmp_path / "interactive.sbatch"
    path.write_text(script.render("interactive", p, SITE, REQUEST))
    command = ["script", "-qec", shlex.join([str(SCRIPT), "run", "bash", str(path)]), "/dev/null"]
    env = {**os.environ, **cluster.env}
    said, typed = tmp_path / "said", b"echo nodes=$SLURM_NNODES master=$MASTER_ADDR $(type -t train) >said; exit\n"
    with (tmp_path / "screen").open("wb") as screen:
        shell = subprocess.Popen(command, env=env, cwd=tmp_path, stdin=subprocess.PIPE, stdout=screen)
    assert shell.stdin

    def has_ended() -> bool:
        """Type again what was lost before the prompt came."""
        with contextlib.suppress(BrokenPipeError):
            shell.stdin.write(typed)
            shell.stdin.flush()
        return shell.poll() is not None

    try:
        wait_until(has_ended, 120, f"no end of the shell; the last it showed is in {tmp_path / 'screen'}")
        assert said.read_text() == "nodes=2 master=jz-a100-1 function\n"
    finally:
        shell.kill()


def test_the_watching_job_tells_and_submits_itself_again_until_all_is_over(cluster: Cluster, tmp_path: Path) -> None:
    p = plan("slow", tmp_path.parent / "data", nodes=1)
    folder = run_folder(tmp_path / "runs", p)
    text = (folder / "job.sbatch").read_text()
    (folder / "job.sbatch").write_text(text[: text.index("set -euo")] + "srun bash -c 'trap \"\" USR1; sleep 600'\n")
    job = jobs.submit(folder, SITE, REQUEST)
    site = replace(SITE, service_partition="prepost")
    watcher = script.render("monitor", p, site, REQUEST)
    path = folder.parent / "monitor.sbatch"
    path.write_text(watcher.replace("--every 60 --seconds 480", "--every 1 --seconds 2"))
    first = client.sbatch(path)
    outputs = folder.parent.glob
    wait_until(lambda: len(list(outputs("watch-*.out"))) >= 2, 120, "second watcher")
    said = (folder.parent / f"watch-{first}.out").read_text()
    assert f"slow: job {job} " in said and "Submitted batch job" in said
    client.cancel([job])
    wait_until(lambda: any("DIED" in o.read_text() for o in outputs("watch-*.out")), 120, "death")
    wait_until(lambda: not client.call(["squeue", "-h", "-p", "prepost"]).strip(), 120, "end of the watching")
