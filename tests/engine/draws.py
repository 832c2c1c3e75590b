"""What dropout does on each of two tensor-parallel ranks: one JSON line for each of them, with and
without sequence parallelism. The fixture `ask` runs it on each.
"""

import hashlib
import json
from dataclasses import replace

import torch

from trilane.config.plan import Plan


def fingerprint(mask: torch.Tensor) -> str:
    return hashlib.sha256(mask.contiguous().numpy().tobytes()).hexdigest()[:16]


def drawn(plan: Plan) -> dict:
    """Which values the one layer leaves as they are (both of its dropouts hit), and what attention
    makes of ones.
    """
    from trilane_engine.model.gpt import Attention, build_chunks, transformer_config
    from trilane_engine.model.rng import seed_streams

    shape, t = plan.shape, plan.topology
    model = build_chunks(plan, transformer_config(plan))[0].train()
    model.decoder.final_layernorm = None
    seed_streams(plan.run.seed)
    length = shape.seq_length // (t.tp if t.sequence_parallel else 1)
    x = torch.randn(
        length, 8, shape.hidden_size, generator=torch.Generator().manual_seed(1)
    )  # (S, B, C)
    untouched = model.decoder(hidden_states=x, attention_mask=None) == x
    q, k = torch.zeros(
        2, shape.seq_length, 8, 2, 16
    )  # every position attends to those before it alike
    ones = torch.ones(shape.seq_length, 8, 2, 16)
    attended = Attention(transformer_config(plan), shape=plan.shape)(q, k, ones, None)
    first = model.embedding.embedding_dropout(torch.ones(length, 8, shape.hidden_size))
    return {
        "untouched": untouched.float().mean().item(),
        "layer": fingerprint(untouched),
        "attended": attended.mean().item(),
        "attention": fingerprint(attended),
        "embedding values": sorted(set(first.flatten().tolist())),
        "embedding zeros": (first == 0).float().mean().item(),
    }


if __name__ == "__main__":
    plan: Plan = globals()["plan"]
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(2)
    for parallel in (False, True):
        draws = drawn(replace(plan, topology=replace(plan.topology, sequence_parallel=parallel)))
        print(json.dumps(draws))
