"""How a process finds its place: SLURM's variables, its device, the others of its run, and who asks
it for what.
"""

import functools
import math
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import run_folder, small_plan

from trilane.config.training import Run
from trilane.launch.local import environment
from trilane.logs.endings import ending
from trilane.utils.process import held_port
from trilane.utils.validation import HostError
from trilane.workspace.status import Status
from trilane_engine import torchrun
from trilane_engine.signals import FORWARDED, SAVE, STOP

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}


def test_srun_alone_is_enough_to_find_one_another(commands):
    """The first host of the list; `srun -N2 -n16` sets no SLURM_NTASKS_PER_NODE."""
    from trilane_engine.world import from_slurm

    commands.say("scontrol", "echo gpu003 gpu9")
    given = SLURM | {"SLURM_NODELIST": "gpu[003,9]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    env = dict(given)
    from_slurm(env)
    ranks = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert env == given | ranks | {"MASTER_ADDR": "gpu003", "MASTER_PORT": "13456"}
    assert commands.calls("scontrol") == ["scontrol show hostnames gpu[003,9]"]
    by_torchrun = {"RANK": "0", "SLURM_PROCID": "5"}
    from_slurm(by_torchrun)
    assert by_torchrun == {"RANK": "0", "SLURM_PROCID": "5"}


# compute capability (NVIDIA's table of CUDA GPUs), precision, cards that the task sees -> its card,
# or why not
CARDS = [
    ((7, 0), "bf16", 4, "precision=bf16: needs compute capability 8.0, this card has 7.0; use"),
    ((9, 0), "bf16", 4, 3),
    ((8, 0), "bf16", 1, 0),  # srun --gpus-per-task=1
    ((8, 0), "bf16", 3, "processes per host=4: this host shows 3 GPUs"),
    ((7, 0), "fp16", 4, "has no kernels for this card of compute capability 7.0"),
]


@pytest.mark.parametrize(("capability", "precision", "cards", "outcome"), CARDS, ids=str)
def test_a_task_uses_its_card_where_that_has_the_precision(
    capability: tuple, precision: str, cards: int, outcome: int | str, monkeypatch
):
    """The last of four on its host; torch itself says yes to bf16 on a V100."""
    import torch

    from trilane_engine.world import own_device

    pretended = {
        "is_available": True,
        "device_count": cards,
        "get_device_capability": capability,
        "set_device": None,
        "get_arch_list": ["sm_75", "sm_80", "sm_90"],
    }
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    if isinstance(outcome, int):
        assert own_device(precision) == torch.device("cuda", outcome)
        return
    with pytest.raises(HostError) as caught:
        own_device(precision)
    assert outcome in str(caught.value)


def test_a_world_unlike_the_plan_is_refused_once_by_rank_0(fork, data, tmp_path):
    folder = run_folder(small_plan(data, source="mock", pp=2), tmp_path / "run")
    fork(3, folder, code=2)
    logs = [(folder / f"{rank}.log").read_text() for rank in range(3)]
    assert logs == ["world size=3: must be tp x cp x pp x dp = 1 x 1 x 2 x 1 = 2\n", "", ""]


def test_nodes_that_wait_in_vain_end_as_a_failed_rendezvous(tmp_path, capfd):
    """torchrun's agents: one where the other node is missing, one where the first does
    not answer.
    """
    one = [f"{tmp_path}/f", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=7.0"]
    with held_port() as port:
        one += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    lines = {
        "read_timeout=1,is_host=0": f"the first node does not answer at 127.0.0.1:{port}",
        "join_timeout=1,is_host=1": "fewer than 2 nodes came",
    }
    for settings, why in lines.items():
        assert torchrun._launch([*one, f"--rdzv-conf={settings}", "x.py"]) == 1
        line = f"trilane: rendezvous=7.0: {why}"
        assert line in capfd.readouterr().err
        assert ending(line.encode(), 0).status is Status.RENDEZVOUS


WORKER = """
import time
from trilane_engine.signals import Signals
signals = Signals()
print("ready", flush=True)
while not (signals.save_s > 0 or signals.stop):
    time.sleep(0.01)
print("save" if signals.save_s > 0 else "stop")
"""


def answer(
    send: Callable[[int], object], env: dict[str, str], before: Callable[[], None] | None = None
) -> str:
    """What a worker understands, or "gone"."""
    options = {"env": {**environment(1), **env}, "stdout": -1, "text": True, "preexec_fn": before}
    with subprocess.Popen([sys.executable, "-c", WORKER], **options) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        send(child.pid)
        out = child.stdout.read().strip()
    assert child.returncode in (0, 143)
    return out if child.returncode == 0 else "gone"


def by_parent(number: int) -> Callable[[int], object]:
    return lambda pid: os.kill(pid, number)


def by_another(number: int) -> Callable[[int], object]:
    return lambda pid: subprocess.run(["/bin/kill", f"-{number}", str(pid)], check=True)


OURS = {FORWARDED: "1"}
SENT = {
    "USR1 passed on": (by_parent(SAVE), OURS, "save"),
    "TERM passed on": (by_parent(STOP), OURS, "stop"),
    "TERM of SLURM": (by_another(signal.SIGTERM), OURS, "stop"),
    "TERM of our torchrun": (by_parent(signal.SIGTERM), OURS, "gone"),
}


@pytest.mark.parametrize(("send", "env", "understood"), SENT.values(), ids=SENT)
def test_a_worker_understands_who_asks_for_what(send: Callable, env: dict, understood: str):
    """torchrun sends SIGTERM to clear up after a dead rank; SLURM and a person send it to end a
    run.
    """
    assert answer(send, env) == understood


def test_a_signal_that_comes_while_a_worker_starts_is_not_lost():
    """Our torchrun blocks it; nobody is killed."""

    def early() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {SAVE})
        os.kill(os.getpid(), SAVE)

    assert answer(lambda pid: None, {}, early) == "save"


def requests(folder: Path, monkeypatch, second: float, is_first: bool = True) -> tuple:
    """The signals and requests, at this second, of a run of at most a minute."""
    from trilane_engine import loop

    monkeypatch.setattr(loop, "time", types.SimpleNamespace(monotonic=lambda: second))
    world = types.SimpleNamespace(is_first=is_first, device="cpu")
    signals = types.SimpleNamespace(save_s=-math.inf, stop=False)
    return signals, loop.StopRequests(folder, Run(exit_duration_minutes=1), world, signals, 0.0)


ASKED = [
    (True, ["save"], False, 60.0, "exit_duration_minutes"),
    (True, ["save", "stop"], False, 60.0, "the file `stop`"),
    (True, ["stop"], True, 0.0, "SIGTERM"),
    (False, ["save", "stop"], False, 99.0, ""),
]


@pytest.mark.parametrize(("first", "files", "stop", "second", "reason"), ASKED)
def test_of_what_is_asked_the_most_counts(
    first: bool, files: list, stop: bool, second: float, reason: str, tmp_path, monkeypatch
):
    """Of rank 0's files and clock, and any rank's signals."""
    for name in files:
        (tmp_path / name).touch()
    signals, asked = requests(tmp_path, monkeypatch, second, first)
    signals.stop = stop
    assert asked.requests[asked.pending()].reason == reason
    assert (tmp_path / "save").exists() is ("save" in files and not first)


def test_a_run_leaves_a_slow_node_at_once_and_saves_again_once_the_disk_has_room(
    tmp_path, monkeypatch
):
    """The room is looked at once a minute."""
    from trilane_engine import loop

    _, asked = requests(tmp_path, monkeypatch, 0.0)
    (tmp_path / "save").write_text(loop.RESTART)
    assert [asked.pending(), asked.pending()] == [3, 0]
    asked.retry(8)
    seen = []
    for second, free in ((1.0, 9), (59.0, 9), (61.0, 7), (62.0, 9), (122.0, 9)):
        clock = types.SimpleNamespace(monotonic=functools.partial(float, second))
        monkeypatch.setattr(loop, "time", clock)
        monkeypatch.setattr(loop, "free_bytes", {tmp_path: free}.__getitem__)
        asked._end = math.inf
        seen.append(asked.pending())
    assert seen == [0, 0, 0, 0, 2]
