"""Where a process stands, read from SLURM's variables; and what the schedule asks of the learning rate."""

import json
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from plans import small_plan

from trilane.config.training import Optimizer

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("gpu7", "gpu7"), ("gpu7,gpu9", "gpu7"), ("gpu[003-006,9],x1", "gpu003"), ("r1i[0,4]n2", "r1i0n2")],
)
def test_the_master_is_the_first_host_of_slurms_list(nodelist: str, first: str) -> None:
    """As `scontrol show hostnames` expands it."""
    from trilane.engine.distributed.world import first_host

    assert first_host(nodelist) == first


def test_srun_alone_is_enough_to_find_one_another() -> None:
    from trilane.engine.distributed.world import from_slurm

    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}
    env = slurm | {"SLURM_NODELIST": "gpu[3-4]", "SLURM_JOB_ID": "123456"}
    from_slurm(env)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("5", "8", "1", "4")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("gpu3", "13456")


@pytest.mark.parametrize(
    ("said", "node", "tasks"),
    [("8(x2)", "1", "8"), ("4,2(x3)", "0", "4"), ("4,2(x3)", "3", "2"), ("16", "0", "16"), ("", "0", "5")],
)
def test_the_tasks_of_this_node_are_read_from_the_step(said: str, node: str, tasks: str) -> None:
    """`srun -N2 -n16` sets no SLURM_NTASKS_PER_NODE; srun's page has the form of the list."""
    from trilane.engine.distributed.world import from_slurm

    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "5", "SLURM_LOCALID": "1", "SLURM_NODELIST": "n", "SLURM_JOB_ID": "1"}
    env = slurm | {"SLURM_STEP_TASKS_PER_NODE": said, "SLURM_NODEID": node}
    from_slurm(env)
    assert env["LOCAL_WORLD_SIZE"] == tasks


@pytest.mark.parametrize(
    ("env", "threads"),
    [
        ({}, 2),
        ({"SLURM_CPUS_ON_NODE": "40"}, 10),  # srun bound each of the 4 tasks to 10 cores of its own
        ({"SLURM_CPUS_ON_NODE": "10"}, 2),  # it bound none
        ({"SLURM_CPUS_ON_NODE": "40", "TORCHELASTIC_RUN_ID": "a"}, 2),  # the cores are torchrun's
        ({"OMP_NUM_THREADS": "7"}, 7),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}, 2),  # torchrun's default, nobody's wish
    ],
    ids=str,
)
def test_a_process_takes_the_threads_it_was_given_or_its_share(
    env: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten cores in sight, four processes on the node."""
    from trilane.engine.distributed import world

    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_ON_NODE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "core_numbers", lambda: set(range(10)))
    assert world.threads(4) == threads


def test_torchruns_word_counts_more_than_slurms() -> None:
    from trilane.engine.distributed.world import from_slurm

    env = {"RANK": "0", "SLURM_PROCID": "5"}
    from_slurm(env)
    assert env == {"RANK": "0", "SLURM_PROCID": "5"}


@pytest.mark.parametrize(
    ("samples", "rate"), [(10, 0.5e-3), (20, 1e-3), (60, 0.55e-3), (100, 1e-4), (500, 1e-4)], ids=str
)
def test_the_rate_warms_up_and_follows_a_cosine_by_samples(samples: int, rate: float) -> None:
    """Half the warm-up, its end, half the decay, its end, and after: lr 1e-3, min 1e-4, 20 to 100 samples."""
    optimizer = Optimizer(lr=1e-3, min_lr=1e-4, warmup_samples=20, decay_samples=100)
    assert optimizer.learning_rate(samples, 1000) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("capability", "precision", "refusal"),
    [
        ((7, 0), "bf16", "precision=bf16: needs compute capability 8.0, this card has 7.0; use fp16"),
        ((7, 0), "fp16", None),
        ((8, 0), "bf16", None),
        ((9, 0), "bf16", None),
    ],
    ids=str,
)
def test_a_card_says_by_its_capability_what_it_can(
    capability: tuple, precision: str, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A V100 has 7.0, an A100 8.0, an H100 9.0 (NVIDIA's table of CUDA GPUs); torch says yes to bf16 on all three."""
    import torch

    from trilane.engine.distributed.device import own_device

    pretended = {"is_available": True, "device_count": 1, "get_device_capability": capability, "set_device": None}
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    if refusal is None:
        assert own_device(precision) == torch.device("cuda", 0)
    else:
        with pytest.raises(ValueError) as caught:
            own_device(precision)
        assert str(caught.value) == refusal


@pytest.mark.parametrize(
    ("there", "visible", "cuda", "refusal"),
    [
        (False, None, "13.0", None),
        (True, "", "13.0", None),
        (True, "-1", None, None),
        (True, "NoDevFiles", "13.0", None),
        (True, None, "13.0", "CUDA does not start (see nvidia-smi)"),
        (True, "0,1", "13.0", "CUDA does not start (see nvidia-smi)"),
        (True, None, None, "install its CUDA build"),
    ],
    ids=str,
)
def test_a_host_with_a_gpu_that_torch_cannot_use_is_no_cpu(
    there: bool, visible: str | None, cuda: str | None, refusal: str | None, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait half an hour for a rank that came with gloo."""
    import torch

    from trilane.engine.distributed import device

    file = tmp_path / "nvidia0"
    file.touch() if there else None
    monkeypatch.setattr(device, "GPU", file)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if refusal is None:
        assert device.own_device("fp32") == torch.device("cpu")
    else:
        with pytest.raises(
            device.HostError, match=rf"cannot use {file}: {re.escape(refusal)}; CUDA_VISIBLE_DEVICES=-1"
        ):
            device.own_device("fp32")


def test_what_a_host_lacks_is_said_by_each_of_its_ranks_and_a_common_mistake_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trilane.utils.validation import HostError, print_refusal

    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        print_refusal(ValueError("mbs=0: must be more"))
        print_refusal(HostError("3 GPUs"), "trilane: ")
    here = platform.node()
    wanted = ["mbs=0: must be more", f"trilane: rank 0 on {here}: 3 GPUs", f"trilane: rank 3 on {here}: 3 GPUs"]
    assert capsys.readouterr().err.splitlines() == wanted


@pytest.mark.parametrize(
    ("engine", "topology", "env"),
    [
        ("megatron", {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ("deepspeed-zero", {"tp": 2}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ("deepspeed-zero", {"dp": 2, "zero": 3}, {}),
    ],
    ids=str,
)
def test_what_overlaps_on_streams_of_its_own_keeps_its_queues(
    engine: str, topology: dict, env: dict[str, str], tmp_path: Path
) -> None:
    from trilane.engine.__main__ import limit_queues

    found: dict[str, str] = {}
    limit_queues(small_plan(tmp_path, engine=engine, **topology), found)
    assert found == env


KINDS = """
import os, torch
from trilane.engine.distributed import world
world.own_device = lambda precision: torch.device("cpu" if os.environ["RANK"] == "1" else "cuda")
try:
    world.start_process_group("fp32")
except ValueError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_gpus_here_and_none_there_is_refused_on_both_sides_and_not_waited_for(ask: Callable, tmp_path: Path) -> None:
    """A node whose driver is not loaded at all has no device file either."""
    with_gpu, without = ask(small_plan(tmp_path, dp=2), KINDS, joined=False).splitlines()
    assert with_gpu == "ValueError GPUs=1: 1 of 2 ranks have none, and report it"
    assert without == "HostError no GPU here, while 1 of 2 ranks have one"


LACKING = """
import os, torch
from trilane.engine.__main__ import main
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 3
os.environ.update(RANK="3", WORLD_SIZE="4", LOCAL_RANK="3", LOCAL_WORLD_SIZE="4")
del os.environ["TRILANE_RANK_LOGS"]
os.dup2(1, 2)  # what it prints about itself is an answer, too
print(main([sys.argv[0]]))
"""


@pytest.mark.slow
def test_a_node_that_lacks_a_gpu_ends_the_job_with_a_word(ask: Callable, tmp_path: Path) -> None:
    """Rank 3 of a world of four, whose host shows three GPUs."""
    (tmp_path / "plan.json").write_text(json.dumps(small_plan(tmp_path, dp=4).to_json()))
    code = f"sys.argv = [{str(tmp_path / 'plan.json')!r}]\n{LACKING}"
    said = f"rank 3 on {platform.node()}: processes per host=4: this host shows 3 GPUs"
    assert ask(small_plan(tmp_path), code, joined=False).splitlines() == [said, "2"]


@pytest.mark.parametrize(("cards", "own"), [(4, 3), (1, 0)], ids=["all cards", "srun --gpus-per-task=1"])
def test_a_task_uses_the_card_of_its_number_or_the_only_one_it_sees(
    cards: int, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from trilane.engine.distributed.device import own_device

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    chosen: list[int] = []
    answers = {"is_available": True, "device_count": cards, "get_device_capability": (9, 0)}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert own_device("bf16") == torch.device("cuda", own) and chosen == [own]


def test_all_processes_that_share_a_card_are_refused_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees one card: only its number shows whether it is its own (a task of `srun --gpus-per-task=1` has one)."""
    import torch

    from trilane.engine.distributed import device
    from trilane.utils.validation import HostError

    store, card, uuids = torch.distributed.HashStore(), torch.device("cuda", 0), threading.local()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: uuids)
    monkeypatch.setattr(device.time, "sleep", lambda _: None)

    def refused(rank: int) -> str:
        uuids.uuid = "aba"[rank]
        try:
            device.require_own_card(store, rank, 3, card)
        except HostError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as ranks:
        found = list(ranks.map(refused, range(3)))
    assert [line.partition(":")[0] for line in found] == ["rank=0", "", "rank=2"]


def test_the_chosen_order_of_attention_kernels_lasts() -> None:
    """Torch's context of kernels, not kept, is left at once: the log named a kernel that did not run."""
    code = """
import torch
from torch.nn.attention import SDPBackend
from trilane.engine.model.fused_path import prefer
prefer([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH])
print(torch._C._get_sdp_priority_order()[:2], torch.backends.cuda.flash_sdp_enabled())
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    from torch.nn.attention import SDPBackend

    wanted = [int(SDPBackend.CUDNN_ATTENTION.value), int(SDPBackend.MATH.value)]
    assert run.stdout.split("\n")[-2] == f"{wanted} False"
