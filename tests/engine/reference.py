"""The reference for every engine and topology: a plain torch GPT in one process with
torch's AdamW, in fp64.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from megatron.core.datasets.utils import Split

from trilane.config.model import ModelShape
from trilane.config.plan import Plan
from trilane_engine.data.corpus import prepare_all
from trilane_engine.data.samples import Samples, samples_of
from trilane_engine.model.parameters import initial_tensor, whole_sizes
from trilane_engine.world import World

WORDS = "embedding.word_embeddings.weight"
Weights = Mapping[str, torch.Tensor]
# whether a token goes to an expert, and the softmax over all experts, both (B, T, E)
Routed = tuple[torch.Tensor, torch.Tensor]
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "xielu": lambda x, p, n: (
        x / 2 + torch.where(x > 0, F.softplus(p) * x**2, (F.softplus(n) + 0.5) * (x.expm1() - x))
    ),
    "squared-relu": lambda x: F.relu(x) ** 2,
    "swiglu": F.silu,
    "geglu": F.gelu,
}


def logits(
    w: Weights, shape: ModelShape, tokens: torch.Tensor, routed: list[Routed] | None = None
) -> torch.Tensor:
    """Tokens (B, T) -> logits (B, T, V); `routed` gets the choices of each layer with experts."""
    x = w[WORDS][tokens]
    if shape.positions == "learned":
        x = x + w["embedding.position_embeddings.weight"][: tokens.shape[1]]
    if shape.embedding_layernorm:
        x = norm(w, shape, "embedding.layernorm", x)
    for i in range(shape.num_layers):
        layer = f"decoder.layers.{i}"
        normed = norm(w, shape, f"{layer}.input_layernorm", x)
        x = x + attention(w, f"{layer}.self_attention", shape, normed, i + 1)
        normed = norm(w, shape, f"{layer}.pre_mlp_layernorm", x)
        if f"{layer}.mlp.router.weight" in w:
            out, choices = mixture(w, f"{layer}.mlp", shape, normed)
            x = x + out
            if routed is not None:
                routed.append(choices)
        else:
            x = x + mlp(w, f"{layer}.mlp", shape, normed)
    head = w[WORDS] if shape.tied_embeddings else w["output_layer.weight"]
    return norm(w, shape, "decoder.final_layernorm", x) @ head.T


def loss(
    w: Weights,
    shape: ModelShape,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    routed: list[Routed] | None = None,
) -> torch.Tensor:
    """Mean cross-entropy in nats; tokens and labels (B, T)."""
    return F.cross_entropy(logits(w, shape, tokens, routed).flatten(0, 1), labels.flatten())


def linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """A matrix, and its bias where it has one."""
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def norm(w: Weights, shape: ModelShape, name: str, x: torch.Tensor) -> torch.Tensor:
    """LayerNorm, or RMSNorm, which subtracts no mean and adds no bias."""
    weight = w[f"{name}.weight"]
    if shape.normalization == "layernorm":
        return F.layer_norm(x, x.shape[-1:], weight, w[f"{name}.bias"], shape.norm_epsilon)
    return x * (x.square().mean(-1, keepdim=True) + shape.norm_epsilon).rsqrt() * weight


def attention(
    w: Weights, name: str, shape: ModelShape, x: torch.Tensor, number: int
) -> torch.Tensor:
    """Causal attention written out; G groups of heads of D channels share keys and values."""
    B, T, _ = x.shape
    G, D = shape.kv_heads, shape.head_dim
    qkv = linear(w, f"{name}.linear_qkv", x).view(B, T, G, -1, D)
    qkv = qkv.permute(0, 2, 3, 1, 4)  # (B, G, heads + 2, T, D)
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]
    if shape.qk_layernorm:
        q, k = norm(w, shape, f"{name}.q_layernorm", q), norm(w, shape, f"{name}.k_layernorm", k)
    if shape.positions == "rotary" and number % (shape.no_rope_freq or number + 1):
        q, k = turned(q, shape.rotary_base), turned(k, shape.rotary_base)
    scores = q @ k.transpose(-1, -2) / D**0.5  # (B, G, heads of a group, T, T)
    if shape.positions == "alibi":
        bias = slopes(shape.num_attention_heads)[:, None, None] * torch.arange(T)
        scores = scores + bias.view(G, -1, 1, T)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
    return linear(w, f"{name}.linear_proj", attended.permute(0, 3, 1, 2, 4).reshape(B, T, -1))


def turned(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary positions: the pair of channels i, i + D / 2 as a complex number, times e^(i position
    base^(-2 i / D)).
    """
    T, D = x.shape[-2:]
    steps = torch.arange(0, D, 2, dtype=x.dtype) / D
    angles = torch.outer(torch.arange(T, dtype=x.dtype), base**-steps)
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), -1)


def slopes(heads: int) -> torch.Tensor:
    """ALiBi's geometric series from 2^(-8 / n); what goes beyond a power of two takes every other
    term of the next.
    """
    power = 2 ** int(math.log2(heads))
    first = [2.0 ** -(8 / power * i) for i in range(1, power + 1)]
    more = [2.0 ** -(4 / power * i) for i in range(1, 2 * power + 1, 2)]
    return torch.tensor(first + more[: heads - power])


def mlp(w: Weights, name: str, shape: ModelShape, x: torch.Tensor) -> torch.Tensor:
    """Two matrices and the activation between, or three, where the second and a gate make its
    input.
    """
    act = ACTIVATIONS[shape.activation]
    alphas = [w[key] for key in w if key.startswith(f"{name}.activation_func.")]  # p, n
    if not shape.is_gated:
        return linear(w, f"{name}.linear_fc2", act(linear(w, f"{name}.linear_fc1", x), *alphas))
    up, bias = w[f"{name}.linear_fc1.weight"], w.get(f"{name}.linear_fc1.bias", (None, None))
    gate, inner = (F.linear(x, up[part], bias[part]) for part in (0, 1))
    return linear(w, f"{name}.linear_fc2", act(gate) * inner)


def mixture(
    w: Weights, name: str, shape: ModelShape, x: torch.Tensor
) -> tuple[torch.Tensor, Routed]:
    """Every expert of every token, weighted by 0 where it was not chosen; the softmax is over all
    experts before the choice, or over the chosen. And the choices.
    """
    scores = linear(w, f"{name}.router", x)
    best, places = scores.topk(shape.top_k)
    chosen = torch.zeros_like(scores).scatter(-1, places, 1.0)
    shares = scores.softmax(-1)
    weights = shares.gather(-1, places) if shape.router_pre_softmax else best.softmax(-1)
    weights = torch.zeros_like(scores).scatter(-1, places, weights * shape.router_scaling)
    out = torch.zeros_like(x)
    for n in range(shape.experts):
        out = out + weights[..., n : n + 1] * mlp(w, f"{name}.experts.{n}", shape, x)
    if shape.shared_experts:
        shared = mlp(w, f"{name}.shared_experts", shape, x)
        if shape.shared_gate:
            shared = shared * F.linear(x, w[f"{name}.shared_experts.gate_weight"]).sigmoid()
        out = out + shared
    return out, (chosen, shares)


def aux_loss(shape: ModelShape, routed: list[Routed], mbs: int) -> torch.Tensor | float:
    """E sum over experts of (share of the choices) x (mean share), of each microbatch and layer:
    Fedus et al. 2022, arXiv:2101.03961, equation 4; the mean over microbatches, times aux_loss.
    """
    total = 0.0
    for pair in routed:
        chosen, shares = [x.view(-1, mbs * x.shape[1], shape.experts).mean(1) for x in pair]
        total = total + (chosen / shape.top_k * shares).sum(-1).mean() * shape.experts
    return shape.aux_loss * total


def train(plan: Plan) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Loss, gradient norm and imbalance of each iteration, and validation losses: whole batches on
    the CPU, in fp64, by the names of steps.jsonl and validation.jsonl.
    """
    o = plan.optimizer
    sizes = whole_sizes(plan.shape)
    drawn = {name: initial_tensor(name, sizes[name], plan).double() for name in sizes}
    w = {name: torch.nn.Parameter(tensor) for name, tensor in drawn.items()}
    single = World(rank=0, size=1, device=torch.device("cpu"))
    prefixes = prepare_all(plan.data, plan.shape)
    samples = samples_of(plan, single, prefixes)
    held_out = range(plan.validation_samples)
    if held_out:
        validation = batch_of(samples_of(plan, single, prefixes, Split.valid), held_out)
    # repeated here: the reference uses no engine code
    plain = [name for name in w if w[name].dim() == 1]
    matrices = [w[name] for name in w if name not in plain]
    groups = [{"params": matrices, "weight_decay": o.weight_decay}]
    groups += [{"params": [w[name] for name in plain], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
    history, evaluations = [], []
    for batch in plan.batches():
        for group in adam.param_groups:
            group["lr"] = o.learning_rate(batch.end, plan.samples)
        adam.zero_grad()
        routed = list[Routed]()
        value = loss(w, plan.shape, *batch_of(samples, range(batch.first, batch.end)), routed)
        (value + aux_loss(plan.shape, routed, plan.topology.mbs)).backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(w.values(), o.clip_grad).item()
        history.append({"lm_loss": value.item(), "grad_norm": grad_norm})
        if routed:
            loads = torch.stack([chosen.sum((0, 1)) for chosen, _ in routed])  # (L, E)
            history[-1]["imbalance"] = (loads.amax(1) / loads.mean(1)).max().item()
        adam.step()
        if plan.run.evaluates_after(batch.number):
            with torch.no_grad():
                value = loss(w, plan.shape, *validation)
            evaluations.append({"iteration": batch.number, "lm_loss": value.item()})
    return history, evaluations


def batch_of(samples: Samples, numbers: range) -> list[torch.Tensor]:
    """Tokens and labels, both (B, T), of these samples."""
    rows = [samples[k] for k in numbers]
    return [torch.stack([row[key] for row in rows]) for key in ("tokens", "labels")]
