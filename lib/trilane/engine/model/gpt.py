"""The GPT that every engine trains: megatron-core's GPTModel for this rank's part of the layers and of each matrix.

Its layers are megatron-core's linear layers around our norm and attention core, without Transformer Engine or apex.
S sequence, B microbatch, C hidden size.
"""

import math
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from trilane.config.model import ModelShape
from trilane.config.plan import Plan
from trilane.engine.model.attention import Attention
from trilane.engine.model.fused import GPT, BiasLinear, FusedMLP, RowLinear, bias_dropout_add
from trilane.engine.model.initial import initial_range
from trilane.engine.model.parameters import is_gated_fc1, split_dim


class Norm(torch.nn.Module):
    """torch's LayerNorm or RMSNorm, marked for sequence parallelism (which megatron-core's own torch norm refuses).

    Under sequence parallelism each rank sees a part of the sequence, so its gradients are partial: the mark on the
    parameters makes finalize_model_grads sum them over the tensor-parallel group.
    """

    bias: torch.nn.Parameter | None

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.eps, self.size = config.layernorm_epsilon, (hidden_size,)
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        bias = None
        if config.normalization == "LayerNorm":
            bias = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.register_parameter("bias", bias)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(S, B, C) -> (S, B, C)."""
        if self.bias is None:
            return F.rms_norm(x, self.size, self.weight, self.eps)
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The approximation of GELU in GPT-2's and BLOOM's code. Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2; megatron-core's own is compiled, whichever path runs. So et al. 2021, arXiv:2109.08668, section 3."""
    return F.relu(x).square()


def layer_spec(shape: ModelShape) -> ModuleSpec:
    """One layer: norm, attention, norm, MLP."""
    spec = get_gpt_layer_local_spec()
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    parts.self_attention.submodules.core_attention = partial(Attention, shape=shape)
    parts.self_attention.submodules.linear_qkv = BiasLinear
    parts.self_attention.submodules.linear_proj = RowLinear
    parts.mlp = FusedMLP
    parts.self_attn_bda = parts.mlp_bda = bias_dropout_add
    return spec


def block_spec(config: TransformerConfig, shape: ModelShape, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage (or of its chunk `vp_stage`), and the norm after the last layer."""
    layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer_spec(shape)] * layers, layer_norm=Norm)


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ACTIVATIONS = {"gelu": F.gelu, "gelu-tanh": gelu_tanh, "relu": F.relu, "squared-relu": squared_relu}
ACTIVATIONS |= {"swiglu": F.silu, "geglu": F.gelu}  # of the gate
DRAWN = 1 << 24  # initial values in memory at a time, 64 MiB
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(plan: Plan) -> TransformerConfig:
    """megatron-core's settings for the plan; whatever needs apex, Transformer Engine or torch.compile is off."""
    shape, t = plan.shape, plan.topology
    dtype, interleaved = DTYPES[t.precision], t.interleaving > 1
    ends = {"first": t.first_stage_layers or None, "last": t.last_stage_layers or None}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.kv_heads,
        ffn_hidden_size=shape.ffn,
        activation_func=ACTIVATIONS[shape.activation],
        gated_linear_unit=shape.is_gated,
        normalization=NORMS[shape.normalization],
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
        bf16=t.precision == "bf16",
        tensor_model_parallel_size=t.tp,
        pipeline_model_parallel_size=t.pp,
        virtual_pipeline_model_parallel_size=t.interleaving if interleaved else None,
        sequence_parallel=t.sequence_parallel,
        account_for_embedding_in_pipeline_split=t.partition != "uniform",
        account_for_loss_in_pipeline_split=t.partition != "uniform",
        **{f"num_layers_in_{end}_pipeline_stage": layers for end, layers in ends.items()},
        # With two stages and batched p2p, interleaving trains wrongly without an error (megatron-core 0.16.1).
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=False,  # for torch before 1.13: it would wait for the device after each message
        cuda_graph_scope=[],  # the default is deprecated and warns
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **RECOMPUTE[t.recompute],
    )


def build_chunks(plan: Plan, settings: TransformerConfig) -> list[GPTModel]:
    """This rank's model chunks (one, or `interleaving` of them) in the initial state, on this rank's device."""
    t = plan.topology
    if t.interleaving == 1:
        return [build_chunk(plan, settings, None)]
    return [build_chunk(plan, settings, stage) for stage in range(t.interleaving)]


def build_chunk(plan: Plan, settings: TransformerConfig, vp_stage: int | None) -> GPTModel:
    """The initialized layers of chunk `vp_stage` of this pipeline rank, with the embedding or the head where due."""
    model = empty_chunk(plan, settings, vp_stage)
    fill(model, plan)
    return model.cuda() if torch.cuda.is_available() else model


def empty_chunk(plan: Plan, settings: TransformerConfig, vp_stage: int | None) -> GPTModel:
    """The same chunk, not yet initialized."""
    shape = plan.shape
    stage = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    model = GPT(
        config=settings,
        transformer_layer_spec=block_spec(settings, shape, vp_stage),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        # Rotary positions and ALiBi are the attention core's.
        position_embedding_type="learned_absolute" if shape.positions == "learned" else "none",
        vp_stage=vp_stage,
    )
    model.z_loss = plan.optimizer.z_loss
    if shape.embedding_layernorm and model.pre_process:
        # The dropout is the embedding's last operation, on this rank's part of the sequence.
        model.embedding.embedding_dropout = NormedDropout(settings)
    return model


class NormedDropout(torch.nn.Module):
    """BLOOM's norm of the embedding, then its dropout."""

    def __init__(self, settings: TransformerConfig) -> None:
        super().__init__()
        self.settings = settings
        self.layernorm = Norm(settings, settings.hidden_size)
        self.dropout = torch.nn.Dropout(settings.hidden_dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(S, B, C) -> (S, B, C)."""
        return self.dropout(self.layernorm(x))


def fill(model: GPTModel, plan: Plan) -> None:
    """Set every parameter to its part of the initial state, and megatron-core's marks of how it is split.

    megatron-core sets those marks in its own initialization, which is off; without them the gradient norm would count
    the split matrices of one tensor-parallel rank only.
    """
    fill_parameters(canonical_parameters(model, plan.shape.tied_embeddings), plan)


def fill_parameters(named: Iterable[tuple[str, torch.nn.Parameter]], plan: Plan) -> None:
    """The same for parameters by whole-model names, a few rows at a time; of what ZeRO-3 divides, this rank's share."""
    rank, tp = parallel_state.get_tensor_model_parallel_rank(), plan.topology.tp
    for name, parameter in named:
        dim, stride = split_dim(name), 2 if is_gated_fc1(name, plan.shape) else 1
        if dim is not None and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, dim, stride)
        size = tuple(getattr(parameter, "ds_shape", parameter.shape))
        divided = getattr(parameter, "ds_tensor", None)
        held = (parameter if divided is None else divided).data.view(-1)
        first = 0 if divided is None else len(held) * parallel_state.get_data_parallel_rank()
        end = min(first + len(held), math.prod(size))  # the last share of all is padded
        for at in range(first, end, DRAWN):
            drawn = initial_range(name, size, rank, tp, plan, at, min(at + DRAWN, end))
            held[at - first : at - first + len(drawn)].copy_(drawn)


def canonical_parameters(model: GPTModel, tied: bool) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter with its whole-model name: layers counted from the first stage, a tied head by the embedding's."""
    numbers = {str(i): layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        name = name.replace(".embedding_dropout.", ".")
        name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda found: str(numbers[found.group()]), name)
        if tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, parameter
