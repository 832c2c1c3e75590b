"""Dropout: the right share of the right values on every rank, and recomputation that draws the same
again.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from parity import SHAPE, TASKS
from plans import HERE, run_folder, small_plan, steps

from trilane.config.plan import Plan
from trilane.config.training import Dropout, Run

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported

HALF = Dropout(hidden=0.5, attention=0.5)


@pytest.fixture(scope="module")
def drawn(ask: Callable) -> dict[bool, list[dict]]:
    """What each of two tensor-parallel ranks drew, without and with sequence parallelism; shares of
    one half.
    """
    plan = replace(small_plan(Path("data"), tp=2), shape=replace(SHAPE, num_layers=1), dropout=HALF)
    draws = [
        json.loads(line)
        for line in ask(plan, (Path(__file__).parent / "draws.py").read_text()).splitlines()
    ]
    return {parallel: draws[parallel::2] for parallel in (False, True)}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_share_that_is_dropped_is_the_share_asked_for(
    drawn: dict, sequence_parallel: bool
) -> None:
    """64 x 8 x 64 values (half of them under sequence parallelism), each share within five standard
    deviations.
    """
    for draw in drawn[sequence_parallel]:
        values = 64 * 8 * 64 / (1 + sequence_parallel)
        assert draw["embedding values"] == [0.0, 2.0]  # what stays is scaled by 1 / (1 - 0.5)
        assert draw["embedding zeros"] == pytest.approx(0.5, abs=5 * (0.25 / values) ** 0.5)
        assert draw["untouched"] == pytest.approx(
            0.25, abs=5 * (0.1875 / values) ** 0.5
        )  # after attention and MLP
        # Position i averages over i + 1 draws of 0 or 2, for 8 samples and 2 heads: variance 1 / (i
        # + 1) each.
        deviation = (sum(1 / (i + 1) for i in range(64)) / 64**2 / (8 * 2)) ** 0.5
        assert draw["attended"] == pytest.approx(1.0, abs=5 * deviation)


def test_what_ranks_hold_alike_is_dropped_alike_and_what_they_share_out_is_not(drawn: dict) -> None:
    """Heads always differ. Hidden values differ only where each rank has its own part of the
    sequence.
    """
    whole, part = drawn[False], drawn[True]
    assert whole[0]["layer"] == whole[1]["layer"]
    assert part[0]["layer"] != part[1]["layer"]
    assert whole[0]["attention"] != whole[1]["attention"]


@pytest.mark.parametrize(("normed", "share"), [(False, 0.1), (True, 0.0)])
def test_an_embedding_with_a_norm_is_dropped_behind_it_alone(
    normed: bool, share: float, data: Path
) -> None:
    from trilane_engine.backends.deepspeed_3d import Positions

    plan = small_plan(data, shape=replace(SHAPE, embedding_layernorm=normed))
    assert Positions(plan, SimpleNamespace(hidden_dropout=0.1, params_dtype=None)).dropout == share


def dropping(engine: str, data: Path, **topology: object) -> Plan:
    """Two iterations with a tenth dropped everywhere."""
    plan = TASKS["plain"].plan(HERE, str(data), engine, **topology)
    return replace(plan, dropout=Dropout(hidden=0.1, attention=0.1), run=Run(train_iters=2))


RECOMPUTED = [
    ("megatron", ["full", "selective"], {"pp": 2, "interleaving": 2}),
    ("deepspeed-zero", ["full", "selective"], {"tp": 2, "zero": 1}),
    ("deepspeed-3d", ["full"], {"tp": 2, "pp": 2, "zero": 1, "sequence_parallel": True}),
    ("hf-zero3", ["full"], {"dp": 2, "zero": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "ways", "topology"), RECOMPUTED, ids=str)
def test_recomputation_drops_the_very_same(
    engine: str,
    ways: list,
    topology: dict,
    fork: Callable,
    truth: Callable,
    data: Path,
    tmp_path: Path,
) -> None:
    """Losses equal to the last bit, and no longer those without dropout."""
    losses = {}
    for way in ["none", *ways]:
        plan = dropping(engine, data, recompute=way, **topology)
        folder = run_folder(plan, tmp_path / way)
        fork(plan.topology.gpus, folder)
        losses[way] = [step["lm_loss"] for step in steps(folder)]
    assert all(losses[way] == losses["none"] for way in ways)
    assert (
        max(abs(a - b) for a, (b, _) in zip(losses["none"], truth(TASKS["plain"], 2), strict=False))
        > 1e-3
    )


COUNT = """
import torch
import torch.nn.functional as F
calls, plain = [], F.scaled_dot_product_attention
def counted(*args, **options):
    calls.append(1)
    return plain(*args, **options)
F.scaled_dot_product_attention = counted
from trilane_engine.backends.base import Microbatch, build
engine, tokens = build(plan, world), torch.zeros(2, 64, dtype=torch.int64)
engine.step([Microbatch(tokens=tokens, labels=tokens)] * 4, 1e-3)
print(len(calls))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "again", "choices"),
    [
        ("megatron", 4, {"recompute": "selective"}),
        ("megatron", 3, {"recompute": "block", "recompute_layers": 3}),
        ("deepspeed-3d", 4, {"recompute": "full", "zero": 1}),
        ("deepspeed-3d", 3, {"recompute": "block", "recompute_layers": 3, "zero": 1}),
    ],
)
def test_what_is_recomputed_is_really_computed_again(
    engine: str, again: int, choices: dict, ask: Callable, data: Path
) -> None:
    """Calls of the attention core for 4 microbatches in one iteration: 4 layers forward, and those
    recomputed.
    """
    assert int(ask(small_plan(data, engine=engine, **choices), COUNT)) == 4 * (4 + again)
