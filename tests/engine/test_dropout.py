"""Dropout: the right share of the right values on every rank, and recomputation that draws the same
again.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from parity import SHAPE, TASKS
from plans import HERE, losses_and_norms, run_folder, small_plan

from trilane.config.plan import Plan
from trilane.config.training import Dropout, Run

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported
# what dropout does on each of two tensor-parallel ranks
DRAW = """
import hashlib, json
from dataclasses import replace
import torch
from megatron.core import parallel_state
from trilane_engine.model.gpt import Attention, build_chunks, transformer_config
from trilane_engine.model.rng import seed_streams

def digest(mask):
    return hashlib.sha256(mask.contiguous().numpy().tobytes()).hexdigest()

parallel_state.initialize_model_parallel(2)
for parallel in (False, True):
    t = replace(plan.topology, sequence_parallel=parallel)
    plan = replace(plan, topology=t)
    model = build_chunks(plan, transformer_config(plan))[0].train()
    model.decoder.final_layernorm = None
    seed_streams(plan.run.seed)
    length = 64 // (2 if parallel else 1)
    x = torch.randn(length, 8, 64, generator=torch.Generator().manual_seed(1))
    untouched = model.decoder(hidden_states=x, attention_mask=None) == x
    # every position attends to those before it alike
    q, k = torch.zeros(2, 64, 8, 2, 16)
    attended = Attention(transformer_config(plan), shape=plan.shape, layer_number=1)(q, k, torch.ones(64, 8, 2, 16), None)
    share = untouched.float().mean().item()
    print(json.dumps([share, attended.mean().item(), digest(untouched), digest(attended)]))
"""


def test_the_right_share_is_dropped_alike_where_ranks_hold_values_alike(ask):
    """Shares of one half, within five standard deviations. Heads always differ; hidden values
    differ only where each rank has its own part of the sequence.
    """
    half = Dropout(hidden=0.5, attention=0.5)
    plan = replace(small_plan(Path("data"), tp=2), shape=replace(SHAPE, num_layers=1), dropout=half)
    lines = [json.loads(line) for line in ask(plan, DRAW).splitlines()]
    for number, (untouched, attended, _, _) in enumerate(lines):
        values = 64 * 8 * 64 / (1 + number % 2)  # half of them under sequence parallelism
        assert untouched == pytest.approx(0.25, abs=5 * (0.1875 / values) ** 0.5)
        # Position i averages over i + 1 draws of 0 or 2, for 8 samples and 2 heads: variance 1 / (i
        # + 1) each.
        deviation = (sum(1 / (i + 1) for i in range(64)) / 64**2 / (8 * 2)) ** 0.5
        assert attended == pytest.approx(1.0, abs=5 * deviation)
    (_, _, layer, heads), (_, _, part, _), (_, _, other_layer, other_heads), (_, _, other, _) = (
        lines
    )
    assert layer == other_layer and heads != other_heads and part != other


def dropping(engine: str, data: Path, **topology: object) -> Plan:
    """Two iterations with a tenth dropped everywhere."""
    plan = TASKS["plain"].plan(HERE, str(data), engine, **topology)
    return replace(plan, dropout=Dropout(hidden=0.1, attention=0.1), run=Run(train_iters=2))


HOST = "full, inputs in host memory"
RECOMPUTED = [
    ("megatron", ["full", "selective", HOST], {"pp": 2, "interleaving": 2}),
    ("deepspeed-3d", ["full", HOST], {"tp": 2, "pp": 2, "zero": 1, "sequence_parallel": True}),
    ("deepspeed-zero", [HOST], {"zero": 3}),
    ("hf-zero3", [HOST], {"zero": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "ways", "topology"), RECOMPUTED, ids=str)
def test_recomputation_drops_the_very_same(
    engine: str,
    ways: list,
    topology: dict,
    fork,
    truth: Callable,
    data,
    tmp_path,
):
    """Losses and norms equal to the last bit, and no longer those without dropout."""
    losses = {}
    for way in ["none", *ways]:
        how = {"recompute": way.split(",")[0], "offload_checkpoints": way == HOST}
        plan = dropping(engine, data, **how, **topology)
        folder = run_folder(plan, tmp_path / way)
        fork(plan.topology.gpus, folder)
        losses[way] = losses_and_norms(folder)
    assert all(losses[way] == losses["none"] for way in ways)
    pairs = zip(losses["none"], truth(TASKS["plain"], 4), strict=False)
    assert max(abs(loss - without) for (loss, _), (without, _) in pairs) > 1e-3
