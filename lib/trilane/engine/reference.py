"""The reference for every engine and topology: a plain torch GPT in one process with torch's AdamW."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from trilane.config.model import ModelShape
from trilane.config.plan import Plan
from trilane.engine.data.corpus import prepare_all
from trilane.engine.data.samples import Samples, training_set, validation_set
from trilane.engine.distributed.world import World
from trilane.engine.model.parameters import EMBEDDING_NORM, initial_tensor, whole_sizes

WORDS = "embedding.word_embeddings.weight"


def initial_weights(plan: Plan) -> dict[str, torch.nn.Parameter]:
    """The whole model by its canonical names."""
    sizes = whole_sizes(plan.shape).items()
    return {n: torch.nn.Parameter(initial_tensor(n, size, plan.run.seed, plan.shape)) for n, size in sizes}


def loss(w: Mapping[str, torch.Tensor], shape: ModelShape, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats; tokens and labels (B, T), H heads of D channels."""
    (B, T), H = tokens.shape, shape.num_attention_heads
    linear = lambda x, name: F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])  # noqa: E731
    norm = lambda x, name: F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])  # noqa: E731
    x = w[WORDS][tokens] + w["embedding.position_embeddings.weight"][:T]
    x = norm(x, EMBEDDING_NORM) if shape.embedding_layernorm else x
    for i in range(shape.num_layers):
        layer = f"decoder.layers.{i}"
        qkv = linear(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attention.linear_qkv")
        q, k, v = qkv.view(B, T, H, 3, -1).permute(3, 0, 2, 1, 4)  # (B, H, T, D) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)
        x = x + linear(attended, f"{layer}.self_attention.linear_proj")
        inner = F.gelu(linear(norm(x, f"{layer}.pre_mlp_layernorm"), f"{layer}.mlp.linear_fc1"))
        x = x + linear(inner, f"{layer}.mlp.linear_fc2")
    head = w[WORDS] if shape.tied_embeddings else w["output_layer.weight"]
    logits = norm(x, "decoder.final_layernorm") @ head.T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(plan: Plan) -> tuple[list[tuple[float, float]], list[tuple[int, float]]]:
    """(loss, gradient norm before clipping) of each iteration, and (iteration, validation loss) of each evaluation.

    The whole global batch at once, on the CPU in fp32.
    """
    w, o = initial_weights(plan), plan.optimizer
    single = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
    prefixes = prepare_all(plan.data, plan.shape)
    samples, held_out = training_set(plan, single, prefixes), range(plan.validation_samples)
    validation = batch_of(validation_set(plan, single, prefixes), held_out) if held_out else ()
    plain = [n for n in w if n.endswith("bias") or "layernorm" in n]  # repeated here: the reference uses no engine code
    groups = [
        {"params": [p for n, p in w.items() if n not in plain], "weight_decay": o.weight_decay},
        {"params": [w[n] for n in plain], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
    history, evaluations = [], []
    for batch in plan.batches():
        for group in adam.param_groups:
            group["lr"] = o.learning_rate(batch.end, plan.samples)
        adam.zero_grad()
        value = loss(w, plan.shape, *batch_of(samples, range(batch.first, batch.end)))
        value.backward()
        history.append((value.item(), torch.nn.utils.clip_grad_norm_(w.values(), o.clip_grad).item()))
        adam.step()
        if plan.run.evaluates_after(batch.number):
            with torch.no_grad():
                evaluations.append((batch.number, loss(w, plan.shape, *validation).item()))
    return history, evaluations


def batch_of(samples: Samples, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, both (B, T), of these samples."""
    rows = [samples[k] for k in numbers]
    tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
    return tokens, labels
