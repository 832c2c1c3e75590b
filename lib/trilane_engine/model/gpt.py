"""The GPT that every engine trains: megatron-core's GPTModel for this rank's part of the layers and
of each matrix.

Its layers are megatron-core's linear layers around our norm and attention core, without Transformer
Engine or apex. S sequence, B microbatch, C hidden size, H query heads of this rank, G heads of keys
and values, D channels of a head.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from trilane.config.model import ModelShape
from trilane.config.plan import Plan
from trilane_engine.model import context, experts, fused, te
from trilane_engine.model.fused import DTYPES, GPT, compiled
from trilane_engine.model.layer import MLP, XIELU, ColumnLinear, Layer, RowLinear, SelfAttention
from trilane_engine.model.parameters import initial_range, is_gated_fc1, split_dim

# values in memory at a time, 64 MiB: BLOOM-176B's embedding has 14 GB
MOST_DRAWN = 1 << 24
# parameters that each rank has whole, for its heads or channels of the MLP
INNER = re.compile(r"\b([qk]_layernorm|activation_func)\b")


def activation_of(shape: ModelShape) -> Callable[[Tensor], Tensor]:
    """The activation function, of the gate where there is one; a class where it has parameters."""
    functions: dict[str, Any] = {
        "gelu": F.gelu,
        # in GPT-2's and BLOOM's code: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2
        "gelu-tanh": functools.partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        # So et al. 2021, arXiv:2109.08668, section 3; megatron-core's own is compiled, whichever
        # path runs
        "squared-relu": lambda x: F.relu(x).square(),
        "xielu": XIELU,
        "swiglu": F.silu,
        "geglu": F.gelu,
    }
    return functions[shape.activation]


class Attention(nn.Module):
    """The attention core of every engine: causal, with rotary positions or ALiBi, and keys that
    groups of heads share.

    The positions are here: DeepSpeed's pipeline has no GPTModel that would pass angles on, and
    under ZeRO-3 megatron-core would compute their wavelengths in 16 bits.
    """

    def __init__(self, config: TransformerConfig, *, shape: ModelShape, **place: Any) -> None:
        super().__init__()
        self.shape = shape
        self.has_rope = shape.has_rope(place["layer_number"])
        self.dropout = config.attention_dropout
        self.splits_sequence = config.sequence_parallel
        self.shares = config.context_parallel_size  # ranks that have a part of each sequence
        # one pass instead of five
        self.turn = compiled(rotated) if config.bias_activation_fusion else rotated
        self.keeps_scores = config.attention_backend == AttnBackend.unfused
        # Transformer Engine has no slopes of ours
        adds_mask = self.keeps_scores or shape.positions == "alibi"
        self.core = None
        if te.is_chosen(config) and not adds_mask:
            self.core = te.Core(config, **place)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        **_: Any,
    ) -> Tensor:
        """Query (S, B, H, D), key and value (S, B, G, D) -> (S, B, H D)."""
        if self.has_rope:
            length = len(query) * self.shares
            cos, sin = rotations(
                length, self.shape.head_dim, self.shape.rotary_base, query.device, query.dtype
            )
            if self.shares > 1:
                cos = context.own_part(cos)
                sin = context.own_part(sin)
            query = self.turn(query, cos, sin)
            key = self.turn(key, cos, sin)
            # a view of all channels would keep those of queries and keys, too, unturned
            value = value.contiguous()
        if self.core:
            return self.core(query, key, value)
        if self.shares == 1:
            return self._attended(query, key, value)
        # a view would keep the channels of own keys and values, too
        halves = query.contiguous().chunk(2)
        key = context.gathered(key)
        value = context.gathered(value)
        parts = []
        for half, number in zip(halves, context.own_chunks(), strict=True):
            end = (number + 1) * len(half)
            parts.append(self._attended(half, key[:end], value[:end]))
        return torch.cat(parts)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As forward(); the last query attends to all keys, those before it to one less each."""
        q = query.permute(1, 2, 0, 3)  # (B, H or G, S, D), and so k and v
        k = key.permute(1, 2, 0, 3)
        v = value.permute(1, 2, 0, 3)
        grouped = k.size(1) < q.size(1)
        if grouped and (self.keeps_scores or not has_grouped_kernel(q, self.shape)):
            k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
            v = v.repeat_interleave(q.size(1) // v.size(1), dim=1)
            grouped = False
        mask: Any = None
        if self.keeps_scores or self.shape.positions == "alibi":
            mask = self._mask(q, k.size(2))
        elif q.size(2) < k.size(2):
            mask = context.causal_mask(q, k)
        dropout = self.dropout if self.training else 0.0
        # The tracker's generator differs on each tensor-parallel rank, as its heads do;
        # recomputation rewinds it. Under sequence parallelism the whole layer already draws from
        # it: forked twice it would be rewound wrongly.
        forked = dropout and not self.splits_sequence
        with tensor_parallel.get_cuda_rng_tracker().fork() if forked else nullcontext():
            if self.keeps_scores:
                out = attention_by_scores(q, k, v, mask, dropout)
            else:
                out = F.scaled_dot_product_attention(
                    q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=grouped
                )
        return out.permute(2, 0, 1, 3).flatten(2)  # (S, B, H D)

    def _mask(self, q: Tensor, length: int) -> Tensor:
        """ALiBi of this rank's heads, for the last S of `length` places, (B, H, S, length); else
        the causal mask.
        """
        slopes: tuple[float, ...] = (0.0,)
        if self.shape.positions == "alibi":
            first = q.size(1) * parallel_state.get_tensor_model_parallel_rank()
            slopes = alibi_slopes(self.shape.num_attention_heads)[first : first + q.size(1)]
        mask = alibi(slopes, length, q.device, q.dtype)[:, :, -q.size(2) :]
        return mask.expand(len(q), -1, -1, -1)


def attention_by_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Attention written out, (B, H, S, D); `mask` (B, H or 1, S, S) is added to the scores.

    Kept for the backward pass, as the planner counts it for `scores`: softmax's result, dropout's
    mask and its result. torch's softmax sums 16-bit values in fp32, as Megatron-LM's; its own math
    kernel would keep 16 bits as 32.
    """
    B, H, S, D = q.shape
    scores = torch.baddbmm(  # scaled without a copy of q
        q.new_empty(1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=D**-0.5
    )
    weights = scores.view(B, H, S, -1).add_(mask).softmax(-1)
    return F.dropout(weights, dropout) @ v


def has_grouped_kernel(q: Tensor, shape: ModelShape) -> bool:
    """Whether torch has a kernel that reads shared keys once: flash alone, in 16 bits, from Ampere
    on, unmasked.

    Elsewhere its plain attention would write the s x s scores
    (torch.nn.functional.scaled_dot_product_attention on `enable_gqa`); repeated keys keep the
    memory-efficient kernel.
    """
    plain = q.dtype == torch.float32 or shape.positions == "alibi"
    return not plain and fused.capability(q.device) >= (8, 0)


@functools.lru_cache(maxsize=4)
def rotations(
    length: int, channels: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle at each position and channel, each (S, 1, 1, D); the halves of D
    are alike.

    Position p turns channels i and i + D / 2 by p base^(-2 i / D). Su et al. 2021,
    arXiv:2104.09864, equation 15, with the pairs of Llama in transformers and megatron-core, whose
    two halves are the paper's even and odd channels.
    """
    steps = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
    places = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(places, base**-steps).repeat(1, 2)[:, None, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(S, B, heads, D), each pair of channels turned by its angle."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head of the whole model: 2^(-8 i / n), i = 1 .. n, for n heads, a power of
    two.

    For another number those of the power of two below it, then every other slope of twice that
    power. Press, Smith and Lewis 2022, arXiv:2108.12409, section 3 and its code.
    """
    whole = 1 << heads.bit_length() - 1
    slopes = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    return (*slopes, *(2 ** (-4 * i / whole) for i in range(1, 2 * (heads - whole), 2)))


@functools.lru_cache(maxsize=2)
def alibi(
    slopes: tuple[float, ...], length: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """What is added to the scores: slope x (key - query) up to the query, -inf after it, (1, H, S,
    S).

    BLOOM adds slope x key, which is the same to softmax; these values are near 0 where the weights
    are not, so that 16 bits hold them. Kept for all layers: 2 H S^2 bytes in 16 bits, which
    costmodel/memory.py counts among the buffers.
    """
    places = torch.arange(length, dtype=torch.float32, device=device)
    distance = places[None, :] - places[:, None]
    added = torch.empty(1, len(slopes), length, length, dtype=dtype, device=device)
    for head, slope in enumerate(slopes):
        added[0, head] = (slope * distance).masked_fill(distance > 0, -math.inf)
    return added


class Norm:
    """Makes torch's LayerNorm or RMSNorm, (S, B, C) -> (S, B, C), marked for sequence parallelism.

    There each rank sees a part of the sequence, so its gradients are partial: the mark on the
    parameters makes finalize_model_grads sum them over the tensor-parallel group. megatron-core's
    own torch norm refuses it.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, *_: Any, **__: Any) -> Any:
        kind = nn.LayerNorm if config.normalization == "LayerNorm" else nn.RMSNorm
        norm = kind(hidden_size, config.layernorm_epsilon, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def sum_over_tp(gradient: Tensor) -> Tensor:
    """The sum of a gradient over tensor-parallel ranks: a hook of a parameter that they
    hold whole.
    """
    whole = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=parallel_state.get_tensor_model_parallel_group())
    return whole


def layer_spec(shape: ModelShape, config: TransformerConfig, number: int = 0) -> ModuleSpec:
    """Layer `number`, from 0: norm, attention, norm, MLP or experts."""
    spec = get_gpt_layer_local_spec()
    spec.module = Layer
    parts = spec.submodules
    parts.self_attention.module = SelfAttention
    parts.mlp = MLP
    if number >= shape.num_layers - shape.expert_layers:
        parts.mlp = experts.experts_spec()
    fused_parts = te.is_chosen(config)
    norm = te.Norm if fused_parts else Norm
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    parts.self_attention.params["head_norm"] = norm if shape.qk_layernorm else None
    attention = parts.self_attention.submodules
    attention.linear_qkv = te.ColumnLinear if fused_parts else ColumnLinear
    attention.linear_proj = te.RowLinear if fused_parts else RowLinear
    attention.q_layernorm = attention.k_layernorm = None
    attention.core_attention = functools.partial(Attention, shape=shape)
    return spec


def transformer_config(plan: Plan) -> TransformerConfig:
    """megatron-core's settings for the plan; whatever needs apex or torch.compile is off."""
    shape = plan.shape
    t = plan.topology
    dtype = DTYPES[t.precision]
    interleaved = t.interleaving > 1
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        activation_func=activation_of(shape),
        gated_linear_unit=shape.is_gated,
        normalization="LayerNorm" if shape.normalization == "layernorm" else "RMSNorm",
        add_bias_linear=shape.biases == "all",
        add_qkv_bias=shape.biases == "qkv",
        hidden_dropout=plan.dropout.hidden,
        attention_dropout=plan.dropout.attention,
        layernorm_epsilon=shape.norm_epsilon,
        init_method_std=plan.optimizer.init_std,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        fp16=t.precision == "fp16",
        bf16=t.precision in ("bf16", "fp8"),
        **te.settings(plan),
        **experts.settings(plan),
        tensor_model_parallel_size=t.tp,
        pipeline_model_parallel_size=t.pp,
        virtual_pipeline_model_parallel_size=t.interleaving if interleaved else None,
        context_parallel_size=t.cp,
        sequence_parallel=t.sequence_parallel,
        account_for_embedding_in_pipeline_split=t.partition != "uniform",
        account_for_loss_in_pipeline_split=t.partition != "uniform",
        num_layers_in_first_pipeline_stage=t.first_stage_layers or None,
        num_layers_in_last_pipeline_stage=t.last_stage_layers or None,
        # With two stages and batched p2p, interleaving trains wrongly without an error
        # (megatron-core 0.16.1).
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # once they are sent: Megatron-LM's schedule needs their graph alone
        deallocate_pipeline_outputs=True,
        attention_backend=AttnBackend.unfused if t.attention == "scores" else AttnBackend.auto,
        # for torch before 1.13: it would wait for the device after each message
        batch_p2p_sync=False,
        cuda_graph_scope=[],  # the default is deprecated and warns
        recompute_granularity={"none": None, "block": "full"}.get(t.recompute, t.recompute),
        recompute_method={"full": "uniform", "block": "block"}.get(t.recompute),
        recompute_num_layers={"full": 1, "block": t.recompute_layers}.get(t.recompute),
    )


def build_chunks(
    plan: Plan, settings: TransformerConfig, layer: ModuleSpec | None = None
) -> list[GPTModel]:
    """This rank's model chunks (one, or `interleaving` of them) in the initial state, on this
    rank's device.
    """
    stages = range(plan.topology.interleaving)
    models = [empty_chunk(plan, settings, stage, layer) for stage in stages]
    for model in models:
        fill_parameters(canonical_parameters(model, plan.shape.tied_embeddings), plan)
    return [model.cuda() if torch.cuda.is_available() else model for model in models]


def empty_chunk(
    plan: Plan,
    settings: TransformerConfig,
    vp_stage: int = 0,
    layer: ModuleSpec | None = None,
) -> GPTModel:
    """Chunk `vp_stage` of this pipeline rank, not initialized, with the embedding or the head where
    due.
    """
    shape = plan.shape
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    first = get_transformer_layer_offset(settings, vp_stage)
    numbers = range(first, first + get_num_layers_to_build(settings, vp_stage))
    layers = [layer or layer_spec(shape, settings, number) for number in numbers]
    model = GPT(
        config=settings,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        # Rotary positions and ALiBi are the attention core's.
        position_embedding_type="learned_absolute" if shape.positions == "learned" else "none",
        vp_stage=vp_stage,
    )
    if shape.embedding_layernorm and model.pre_process:
        # The dropout is the embedding's last operation, on this rank's part of the sequence.
        model.embedding.embedding_dropout = NormedDropout(settings)
    return model


class NormedDropout(nn.Module):
    """BLOOM's norm of the embedding, then its dropout."""

    def __init__(self, settings: TransformerConfig) -> None:
        super().__init__()
        self.settings = settings
        self.layernorm = Norm(settings, settings.hidden_size)
        self.dropout = nn.Dropout(settings.hidden_dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.layernorm(x))


def fill_parameters(named: Iterable[tuple[str, nn.Parameter]], plan: Plan) -> None:
    """Set parameters, by whole-model names, to their part of the initial state; what ZeRO-3 divides
    to its share.

    An own layer's parameters keep what its class gave them, but for what megatron-core's linear
    layers divide.
    """
    for name, parameter in named:
        rank, tp = experts.tensor_parallel(name)
        # as those of an own layer are
        is_marked = getattr(parameter, "tensor_model_parallel", False)
        if plan.layer and ".layers." in name and not is_marked:
            continue
        if is_marked:
            dim = getattr(parameter, "partition_dim", 0)
        else:
            dim = split_dim(name)
        stride = 2 if is_gated_fc1(name, plan.shape) else 1
        # megatron-core sets these marks in its own initialization, which is off; without them the
        # gradient norm would count the split matrices of one tensor-parallel rank only.
        if dim is not None and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, dim, stride)
        # what is marked is summed elsewhere
        is_summed = getattr(parameter, "sequence_parallel", False)
        if tp > 1 and not is_summed and INNER.search(name):
            parameter.register_hook(sum_over_tp)
        size = tuple(getattr(parameter, "ds_shape", parameter.shape))
        fill(parameter, functools.partial(initial_range, name, size, rank, tp, plan, dim=dim))


def fill(parameter: Tensor, draw: Callable[[int, int], Tensor]) -> None:
    """Set what this rank holds of a parameter, its share under ZeRO-3, to `draw(first, end)` of the
    flat values.
    """
    divided: Tensor | None = getattr(parameter, "ds_tensor", None)
    held = (parameter if divided is None else divided).data.view(-1)
    first = 0
    if divided is not None:
        first = len(held) * parallel_state.get_data_parallel_rank()
    # the last share of all is padded
    end = min(first + len(held), math.prod(getattr(parameter, "ds_shape", parameter.shape)))
    for at in range(first, end, MOST_DRAWN):
        drawn = draw(at, min(at + MOST_DRAWN, end))
        held[at - first : at - first + len(drawn)].copy_(drawn)


def canonical_parameters(model: GPTModel, tied: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter with its whole-model name; a tied head by the embedding's."""

    def numbered(place: re.Match[str]) -> str:
        """Layers count from the first stage."""
        return str(model.decoder.layers[int(place[0])].layer_number - 1)

    def numbered_expert(place: re.Match[str]) -> str:
        """Experts count from those of the first rank."""
        held = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        return str(held * parallel_state.get_expert_model_parallel_rank() + int(place[1]))

    for name, parameter in model.named_parameters():
        name = name.replace(".embedding_dropout.", ".")
        name = re.sub(r"(?<=decoder\.layers\.)\d+", numbered, name)
        name = re.sub(r"local_experts\.(\d+)", numbered_expert, name)
        if tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, parameter
