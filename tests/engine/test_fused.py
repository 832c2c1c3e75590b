"""The fused path trains what the unfused one does: each part alone, and a whole training on several
topologies.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parity import TASKS
from plans import HERE, changed, small_plan

# Parts are compared uncompiled: the same functions, without the 20 s that a compiler takes.
PARTS = """
import torch, torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from trilane_engine.model.fused import activate, add_dropped, token_losses
parallel_state.initialize_model_parallel(plan.topology.tp)
tp, rank = plan.topology.tp, world.rank
torch.manual_seed(0)
x, bias = torch.randn(5, 2, 24), torch.randn(24)
gate, up = (x + bias).chunk(2, -1)
assert torch.equal(activate(x, bias, F.gelu, False), F.gelu(x + bias))
assert torch.equal(activate(x, bias, F.silu, True), F.silu(gate) * up)
assert torch.equal(activate(x, None, F.gelu, False), F.gelu(x))
assert torch.equal(add_dropped(x, bias, x, 0.0, True), x + (x + bias))
whole, labels = 5 * torch.randn(5, 2, 32), torch.randint(0, 32, (5, 2))
for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
    mine = [whole.chunk(tp, -1)[rank].to(dtype).clone().requires_grad_() for _ in range(3)]
    losses = [token_losses(m.clone(), labels, fused) for m, fused in zip(mine, (True, False))]
    right = F.cross_entropy(whole.to(dtype).float().flatten(0, 1), labels.flatten(), reduction="none").view(5, 2)
    assert (losses[0] - right).abs().max() < 1e-5, dtype
    for loss in losses:
        (loss * torch.arange(1.0, 11).view(5, 2)).sum().backward()
    assert mine[0].grad.dtype == dtype
    assert (mine[0].grad - mine[1].grad).abs().max() <= bound * mine[1].grad.abs().max(), dtype
print("same")
"""


COMPILED = """
import os; os.environ.pop("TORCH_COMPILE_DISABLE")
import torch, torch.nn.functional as F
from trilane_engine.model.fused import activate, compiled, logit_gradient, partial_sums
from trilane_engine.model.fused import compile_problem
assert not compile_problem(torch.device("cpu"))
logits, labels = torch.randn(5, 2, 24).bfloat16(), torch.randint(0, 24, (5, 2))
largest, total, found = compiled(partial_sums)(logits, labels, 0)
log_sum = largest + total.log()
given = (logits, labels, log_sum, torch.ones(5, 2), 0)
assert (log_sum - found - F.cross_entropy(logits.float().mT, labels, reduction="none")).abs().max() < 1e-5
assert (compiled(logit_gradient)(*given) - logit_gradient(*given)).abs().max() < 1e-2
print("same")
"""


@pytest.mark.parametrize("tp", [1, 2])
def test_each_fused_part_computes_what_it_replaces(ask, tp: int):
    """Values and gradients, the vocabulary whole and divided over two ranks."""
    assert ask(small_plan(Path("data"), tp=tp), PARTS) == "same\n" * tp


@pytest.mark.slow
def test_the_compiled_parts_compute_what_the_functions_do(ask):
    """torch.compile with this host's C++ compiler; about 10 s."""
    assert ask(small_plan(Path("data")), COMPILED, joined=False).endswith("same\n")


LAYERS = """
import os; os.environ.pop("TORCH_COMPILE_DISABLE")
import torch
from trilane_engine.backends.base import Microbatch, build
made, texts = build(plan, world), torch.randint(plan.shape.vocab_size, (3, 2, plan.shape.seq_length + 1))
for text in texts:
    print(made.step([Microbatch(tokens=text[:, :-1].contiguous(), labels=text[:, 1:].contiguous())], 1e-3).loss)
assert not torch._dynamo.utils.counters["graph_break"], torch._dynamo.utils.counters["graph_break"]
"""


@pytest.mark.slow
def test_a_layer_compiled_whole_trains_the_same_and_is_one_graph(ask):
    """A Llama of two layers in fp32, by this host's C++ compiler; about 15 s."""
    shape = replace(TASKS["llama"].shape, num_layers=2)
    plan = small_plan(Path("data"), shape=shape, mbs=2, gbs=2)
    ways = (
        ask(changed(plan, "run", fused=fused, seed=1), LAYERS).split() for fused in ("layer", "off")
    )
    compiled, plain = ([float(loss) for loss in losses[-3:]] for losses in ways)
    assert compiled == pytest.approx(plain, abs=2e-6, rel=0)


TOPOLOGIES: dict[str, dict[str, Any]] = {
    "llama": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    "plain": {"engine": "deepspeed-3d", "tp": 2, "pp": 2, "zero": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_fused_training_follows_one_process(train, truth: Callable, data, tmp_path, name: str):
    """As the unfused path does."""
    task = TASKS[name]
    plan = task.plan(HERE, str(data), **TOPOLOGIES[name])
    losses = [step["lm_loss"] for step in train(changed(plan, "run", train_iters=4, fused="on"))]
    assert losses == pytest.approx([loss for loss, _ in truth(task, 4)], abs=1e-5, rel=0)
    logs = "".join(log.read_text() for log in (tmp_path / "run").glob("*.log"))
    assert logs.count("trilane: fused path (run.fused=on)") == 1  # of all ranks
