"""How a process finds its place: SLURM's variables, its device, the others of its run, and who asks
it for what.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from plans import run_folder, small_plan

from trilane.config.engines import has_kernels
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


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[003-006,9],x1", "gpu003"),
        ("r1i[0,4]n2", "r1i0n2"),
    ],
)
def test_srun_alone_is_enough_to_find_one_another(nodelist: str, first: str) -> None:
    """The first host as `scontrol show hostnames` expands the list; `srun -N2 -n16` sets no
    SLURM_NTASKS_PER_NODE.
    """
    from trilane_engine.world import from_slurm

    env = SLURM | {"SLURM_NODELIST": nodelist, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    from_slurm(env)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (
        "5",
        "8",
        "1",
        "4",
    )
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == (first, "13456")
    by_torchrun = {"RANK": "0", "SLURM_PROCID": "5"}
    from_slurm(by_torchrun)
    assert by_torchrun == {"RANK": "0", "SLURM_PROCID": "5"}


THREADS = [
    ({}, 2),
    ({"OMP_NUM_THREADS": "7"}, 7),
    ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}, 2),  # torchrun's default, nobody's wish
]


@pytest.mark.parametrize(("env", "threads"), THREADS, ids=str)
def test_a_process_takes_the_threads_it_was_given_or_its_share(
    env: dict, threads: int, monkeypatch
) -> None:
    """Ten cores in sight, four processes on the node."""
    from trilane_engine import world

    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "core_numbers", lambda: set(range(10)))
    assert world.threads(4) == threads


@pytest.mark.parametrize(
    ("near", "has_private"), [({0, 64}, True), ({64}, True), ({0}, False)], ids=str
)
def test_a_process_stays_near_its_card(near: set[int], has_private: bool, monkeypatch) -> None:
    """Threads that run already, too; not where it may use none of these cores, or by a torch that
    cannot tell them.
    """
    from torch.numa import binding

    from trilane_engine import patches

    monkeypatch.setattr(
        binding, "_get_numa_node_index_for_gpu_index", lambda gpu_index: next(iter(near))
    )
    monkeypatch.setattr(
        binding, "_get_cpu_indices_for_numa_node_MAYBE_NOT_ALLOWED", lambda numa_node_index: near
    )
    if not has_private:
        monkeypatch.delattr(binding, "_node_get_logical_cpus_to_bind_to")
    before, bound = os.sched_getaffinity(0), list[set[int]]()
    go = threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(), bound.append(os.sched_getaffinity(0))))
    thread.start()
    try:
        patches.bind_near(0)
        go.set()
        thread.join()
        assert (
            bound
            == [os.sched_getaffinity(0)]
            == [(near & before or before) if has_private else before]
        )
    finally:
        for number in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(number), before)


# compute capability (NVIDIA's table of CUDA GPUs), precision, cards that the task sees -> its card,
# or why not
CARDS = [
    (
        (7, 0),
        "bf16",
        4,
        "precision=bf16: needs compute capability 8.0, this card has 7.0; use fp16",
    ),
    ((8, 0), "fp8", 4, "precision=fp8: needs compute capability 8.9, this card has 8.0; use bf16"),
    ((9, 0), "bf16", 4, 3),
    ((8, 0), "bf16", 1, 0),  # srun --gpus-per-task=1
    ((8, 0), "bf16", 3, "processes per host=4: this host shows 3 GPUs"),
    (
        (7, 0),
        "fp16",
        4,
        "has no kernels for this card of compute capability 7.0 (sm_75, sm_80, sm_90); install",
    ),
]
# card, torch.cuda.get_arch_list() of a build -> whether that has kernels for it (PyTorch's
# RELEASE.md, 2.11)
CUDA13, CUDA126 = (
    ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
    ["sm_50", "sm_60", "sm_70", "sm_90"],
)
KERNELS = [
    ((7, 0), CUDA13, False),
    ((7, 0), CUDA126, True),
    ((8, 9), CUDA13, True),
    ((8, 0), CUDA126, False),  # machine code of an older generation
    ((12, 1), ["sm_90", "compute_90"], True),
    ((9, 0), ["sm_90a"], True),
    ((9, 0), ["sm_100f", "compute_100"], False),
    ((8, 6), ["sm_80a", "sm_89"], False),
]


@pytest.mark.parametrize(("card", "built", "found"), KERNELS, ids=str)
def test_kernels_are_for_a_card_of_their_generation(card: tuple, built: list, found: bool) -> None:
    assert has_kernels(card, built) is found


@pytest.mark.parametrize(("capability", "precision", "cards", "found"), CARDS, ids=str)
def test_a_task_uses_its_card_where_that_has_the_precision(
    capability: tuple, precision: str, cards: int, found: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of four on its host; torch itself says yes to bf16 on a V100."""
    import torch

    from trilane_engine.world import own_device

    pretended = {
        "is_available": True,
        "device_count": cards,
        "get_device_capability": capability,
        "set_device": None,
    }
    pretended["get_arch_list"] = ["sm_75", "sm_80", "sm_90"]
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    if isinstance(found, int):
        assert own_device(precision) == torch.device("cuda", found)
        return
    with pytest.raises(HostError) as caught:
        own_device(precision)
    assert found in str(caught.value)


def test_a_world_unlike_the_plan_is_refused_once_by_rank_0(
    fork: Callable, data: Path, tmp_path: Path
) -> None:
    folder = run_folder(small_plan(data, source="mock", pp=2), tmp_path / "run")
    fork(3, folder, code=2)
    said = [(folder / f"{rank}.log").read_text() for rank in range(3)]
    assert said == ["world size=3: must be tp x cp x pp x dp = 1 x 1 x 2 x 1 = 2\n", "", ""]


def test_a_node_may_come_ten_minutes_after_the_others_and_slurms_names_decide_which_hosts_the_store() -> (
    None
):
    """torch's own limit for the first node is a minute. What the script itself sets stays."""

    def settings(given: str, env: dict[str, str]) -> dict[str, str]:
        return dict(part.split("=") for part in torchrun.settings(given, env).split(","))

    hosts = {"TRAIN_HOSTS": "n1 n2 n3", "SLURMD_NODENAME": "n1"}
    assert settings("", {}) == {
        "join_timeout": "600",
        "read_timeout": "600",
        "keep_alive_max_attempt": "120",
    }
    assert settings("read_timeout=5, close_timeout=9", {})["read_timeout"] == "5"
    assert [
        settings("", hosts | {"SLURMD_NODENAME": name})["is_host"] for name in ("n1", "n2")
    ] == ["1", "0"]


def test_nodes_that_wait_in_vain_end_as_a_failed_rendezvous(tmp_path, capfd) -> None:
    """torchrun's agents: one where the other node is missing, one where the first does not answer."""
    names = ("torch.distributed.run", "torch.distributed.elastic")
    one = [
        str(tmp_path / "f"),
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-id=7.0",
        "--rdzv-backend=c10d",
    ]
    with held_port() as port:
        at = f"--rdzv-endpoint=127.0.0.1:{port}"
    assert torchrun._launch([*one, at, "--rdzv-conf=read_timeout=1,is_host=0", "x.py"], *names) == 1
    assert (
        f"trilane: rendezvous=7.0: the first node does not answer at 127.0.0.1:{port}"
        in capfd.readouterr().err
    )
    assert torchrun._launch([*one, at, "--rdzv-conf=join_timeout=1,is_host=1", "x.py"], *names) == 1
    line = next(
        x
        for x in capfd.readouterr().err.splitlines()
        if x.startswith("trilane: rendezvous=7.0: fewer than 2")
    )
    assert ending(line.encode(), 0).status is Status.RENDEZVOUS


def test_ranks_that_wait_in_vain_say_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by srun or DeepSpeed's launcher: two of four do not come, or rank 0 does not."""
    import torch

    from trilane_engine import world

    def printed(rank: int) -> str:
        with pytest.raises(HostError) as raised:
            world._meet(rank, 4, torch.device("cpu"))
        assert ending(str(raised.value).encode(), 0).status is Status.RENDEZVOUS
        return str(raised.value)

    monkeypatch.setattr(world, "WAIT_S", 1)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with held_port() as port:
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
            monkeypatch.setenv(name, value)
        at = f"rendezvous=127.0.0.1:{port}: "
        assert printed(1) == f"{at}rank 0 does not answer within 1 s"
    with ThreadPoolExecutor(2) as ranks:
        assert set(ranks.map(printed, [0, 1])) == {
            f"{at}2 of 4 ranks came, not rank 2, 3 within 1 s"
        }


def test_gpus_here_and_fewer_or_none_there_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On both sides, and not waited for; a node whose driver is not loaded at all has no device
    file either.
    """
    import torch

    from trilane_engine import world

    def refused(kind: str) -> str:
        with pytest.raises(ValueError) as raised:
            world._meet(int(kind == "cuda"), 2, torch.device(kind))
        return str(raised.value)

    with held_port() as port:
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
            monkeypatch.setenv(name, value)
    with ThreadPoolExecutor(2) as ranks:
        lines = [
            f"GPUs=1: 1 of 2 ranks have none; this one is on {kind}" for kind in ("cpu", "cuda")
        ]
        assert [*ranks.map(refused, ["cpu", "cuda"])] == lines


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
    env, command = {**environment(1), **env}, [sys.executable, "-c", WORKER]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, text=True, preexec_fn=before
    ) as child:
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


@pytest.mark.parametrize(
    ("send", "env", "understood"),
    [
        (by_parent(SAVE), OURS, "save"),
        (by_parent(signal.SIGTERM), {}, "stop"),
        (by_parent(STOP), OURS, "stop"),
        (by_another(signal.SIGTERM), OURS, "stop"),
        (by_parent(signal.SIGTERM), OURS, "gone"),
    ],
    ids=[
        "USR1 passed on",
        "TERM of srun",
        "TERM passed on",
        "TERM of SLURM",
        "TERM of our torchrun",
    ],
)
def test_a_worker_understands_who_asks_for_what(send: Callable, env: dict, understood: str) -> None:
    """torchrun sends SIGTERM to clear up after a dead rank; SLURM and a person send it to end a
    run.
    """
    assert answer(send, env) == understood


def test_a_signal_that_comes_while_a_worker_starts_is_not_lost() -> None:
    """Our torchrun blocks it; nobody is killed."""

    def early() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {SAVE})
        os.kill(os.getpid(), SAVE)

    assert answer(lambda pid: None, {}, early) == "save"


@pytest.mark.parametrize(
    ("received", "saves"),
    [
        (
            {1: [100.9], 0: [101.1, 101.2]},
            [101],
        ),  # on both sides of an iteration's end, from srun and the launcher
        ({1: [100], 0: [110]}, [100]),  # ten seconds later
        ({1: [100], 0: [110.5]}, [100, 111]),  # asked twice
    ],
    ids=["late", "ten seconds late", "again"],
)
def test_one_signal_saves_once(
    received: dict, saves: list[int], tmp_path: Path, monkeypatch
) -> None:
    """The clock is set by hand, a second per iteration; the two ranks agree in turn, as their
    all-reduce has it.
    """
    import torch

    from trilane_engine import loop

    now, agreed = [0.0], torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        loop.dist, "all_reduce", lambda mine, op: mine.copy_(torch.maximum(mine, agreed))
    )
    signals = [types.SimpleNamespace(save_s=-math.inf, stop=False) for _ in range(2)]
    worlds = [types.SimpleNamespace(is_first=n == 0, device="cpu") for n in range(2)]
    ranks = [loop.StopRequests(tmp_path, Run(), worlds[n], signals[n], 0) for n in range(2)]
    found = []
    for second in range(95, 170):
        now[0] = float(second)
        for n, times in received.items():
            signals[n].save_s = max((s for s in times if s <= second), default=-math.inf)
        agreed = torch.tensor([max(rank.pending() for rank in ranks), 0])
        requests = {rank.now() for rank in ranks}
        assert len(requests) == 1, "the same on all ranks"
        found += [second for request in requests if request.save]
    assert found == saves


def test_a_run_that_is_to_leave_a_slow_node_does_so_at_its_next_save(tmp_path: Path) -> None:
    """Not at once: what was trained since the last save is not lost, and no checkpoint is written
    for it alone.
    """
    from trilane_engine import loop

    signals, world = (
        types.SimpleNamespace(save_s=-math.inf, stop=False),
        types.SimpleNamespace(is_first=True),
    )
    asked = loop.StopRequests(tmp_path, Run(), world, signals, 0)
    (tmp_path / "save").write_text(loop.RESTART)
    assert (asked.pending(due=False), asked.pending(due=True), asked.pending(due=True)) == (0, 3, 0)
    (tmp_path / "save").touch()
    assert asked.pending(due=False) == 2, "what a user asks for is done at once"


@pytest.mark.parametrize(
    ("first", "begun", "files", "stop", "second", "reason"),
    [
        (True, True, ["save"], False, 159.9, "the file `save`"),
        (True, True, ["save"], False, 160.0, "exit_duration_minutes"),
        (True, True, ["save", "stop"], False, 160.0, "the file `stop`"),
        (True, True, ["stop"], True, 0.0, "SIGTERM"),
        (False, True, ["save", "stop"], False, 999.0, ""),
        (True, False, ["save"], False, 999.0, ""),
        (True, False, ["save", "stop"], False, 999.0, "the file `stop`"),
    ],
)
def test_of_what_is_asked_the_most_counts(
    first: bool,
    begun: bool,
    files: list,
    stop: bool,
    second: float,
    reason: str,
    tmp_path: Path,
    monkeypatch,
) -> None:
    """Of rank 0's files and clock, a minute from second 100 on, and any rank's signals; `save` is
    asked for once.
    """
    from trilane_engine import loop

    monkeypatch.setattr(loop, "time", types.SimpleNamespace(monotonic=lambda: second))
    for name in files:
        (tmp_path / name).touch()
    signals, world = (
        types.SimpleNamespace(save_s=-math.inf, stop=stop),
        types.SimpleNamespace(is_first=first),
    )
    asked = loop.StopRequests(tmp_path, Run(exit_duration_minutes=1.0), world, signals, 100.0)
    found = asked.requests[asked.pending(begun)]
    assert (found.reason, found.save, found.stop) == (
        reason,
        bool(reason),
        bool(reason) and "save" not in reason,
    )
    assert (tmp_path / "save").exists() is ("save" in files and not (first and begun))
