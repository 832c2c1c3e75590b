"""The truth that every topology is held to: a plain torch GPT in one process, with torch's own AdamW."""

import torch
import torch.nn.functional as F

from trilane.engine.corpus import prepare
from trilane.engine.data import build_dataset
from trilane.engine.initial import initial_tensor
from trilane.engine.schedule import learning_rate
from trilane.engine.world import World
from trilane.plan import Plan

Weights = dict[str, torch.nn.Parameter]


def initial_weights(plan: Plan) -> Weights:
    """The whole model by megatron-core's names."""
    s, h = plan.shape, plan.shape.hidden_size
    sizes = {
        "embedding.word_embeddings.weight": (s.vocab_size, h),
        "embedding.position_embeddings.weight": (s.seq_length, h),
    }
    linears = {"self_attention.linear_qkv": (3 * h, h), "self_attention.linear_proj": (h, h)}
    linears |= {"mlp.linear_fc1": (4 * h, h), "mlp.linear_fc2": (h, 4 * h)}
    norms = [f"decoder.layers.{i}.{n}" for i in range(s.num_layers) for n in ("input_layernorm", "pre_mlp_layernorm")]
    for norm in [*norms, "decoder.final_layernorm"]:
        sizes |= {f"{norm}.weight": (h,), f"{norm}.bias": (h,)}
    for i in range(s.num_layers):
        for name, size in linears.items():
            sizes |= {f"decoder.layers.{i}.{name}.weight": size, f"decoder.layers.{i}.{name}.bias": size[:1]}
    return {n: torch.nn.Parameter(initial_tensor(n, size, plan.run.seed, s)) for n, size in sizes.items()}


def loss(w: Weights, plan: Plan, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats; tokens and labels (B, T), H heads of D channels."""
    (B, T), H = tokens.shape, plan.shape.num_attention_heads
    linear = lambda x, name: F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])  # noqa: E731
    norm = lambda x, name: F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])  # noqa: E731
    x = w["embedding.word_embeddings.weight"][tokens] + w["embedding.position_embeddings.weight"][:T]
    for i in range(plan.shape.num_layers):
        layer = f"decoder.layers.{i}"
        qkv = linear(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attention.linear_qkv")
        q, k, v = qkv.view(B, T, H, 3, -1).permute(3, 0, 2, 1, 4)  # (B, H, T, D) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)
        x = x + linear(attended, f"{layer}.self_attention.linear_proj")
        inner = F.gelu(linear(norm(x, f"{layer}.pre_mlp_layernorm"), f"{layer}.mlp.linear_fc1"))
        x = x + linear(inner, f"{layer}.mlp.linear_fc2")
    logits = norm(x, "decoder.final_layernorm") @ w["embedding.word_embeddings.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(plan: Plan) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of each iteration; the whole global batch at once."""
    w, o = initial_weights(plan), plan.optimizer
    alone = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
    samples = build_dataset(plan, alone, prepare(plan.data, plan.shape))
    plain = [p for n, p in w.items() if n.endswith("bias") or "layernorm" in n]
    decayed = [p for p in w.values() if all(p is not q for q in plain)]
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
    history = []
    for batch in plan.batches():
        for group in adam.param_groups:
            group["lr"] = learning_rate(o, batch.end, plan.samples)
        rows = [samples[k] for k in range(batch.first, batch.end)]
        adam.zero_grad()
        value = loss(w, plan, torch.stack([r["tokens"] for r in rows]), torch.stack([r["labels"] for r in rows]))
        value.backward()
        history.append((value.item(), torch.nn.utils.clip_grad_norm_(w.values(), o.clip_grad).item()))
        adam.step()
    return history
