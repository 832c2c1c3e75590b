"""Where a process stands, read from SLURM's variables; and what the schedule asks of the learning rate."""

import pytest

from trilane.plan import Optimizer

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("gpu7", "gpu7"), ("gpu7,gpu9", "gpu7"), ("gpu[003-006,9],x1", "gpu003"), ("r1i[0,4]n2", "r1i0n2")],
)
def test_the_master_is_the_first_host_of_slurms_list(nodelist: str, first: str) -> None:
    """As `scontrol show hostnames` expands it."""
    from trilane.engine.world import first_host

    assert first_host(nodelist) == first


def test_srun_alone_is_enough_to_find_one_another() -> None:
    from trilane.engine.world import from_slurm

    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}
    env = slurm | {"SLURM_NODELIST": "gpu[3-4]", "SLURM_JOB_ID": "123456"}
    from_slurm(env)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("5", "8", "1", "4")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("gpu3", "13456")


def test_torchruns_word_counts_more_than_slurms() -> None:
    from trilane.engine.world import from_slurm

    env = {"RANK": "0", "SLURM_PROCID": "5"}
    from_slurm(env)
    assert env == {"RANK": "0", "SLURM_PROCID": "5"}


@pytest.mark.parametrize(
    ("samples", "rate"), [(10, 0.5e-3), (20, 1e-3), (60, 0.55e-3), (100, 1e-4), (500, 1e-4)], ids=str
)
def test_the_rate_warms_up_and_follows_a_cosine_by_samples(samples: int, rate: float) -> None:
    """Half the warm-up, its end, half the decay, its end, and after: lr 1e-3, min 1e-4, 20 to 100 samples."""
    from trilane.engine.schedule import learning_rate

    optimizer = Optimizer(lr=1e-3, min_lr=1e-4, warmup_samples=20, decay_samples=100)
    assert learning_rate(optimizer, samples, 1000) == pytest.approx(rate)


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

    from trilane.engine.world import own_device

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
