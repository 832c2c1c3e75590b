"""The GPT that every engine trains: megatron-core's GPTModel for this rank's part of the layers and of each matrix."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from trilane.config.plan import Plan
from trilane.engine.model.init import STD, initial_slice, split_dim
from trilane.engine.model.layer_spec import Norm, block_spec

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


Whole = Callable[[torch.nn.Parameter], AbstractContextManager[Any]]


RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def config(plan: Plan) -> TransformerConfig:
    """megatron-core's settings for the plan. What needs apex, Transformer Engine or torch.compile is off."""
    shape, t = plan.shape, plan.topology
    dtype, interleaved = DTYPES[t.precision], t.interleaving > 1
    own = {"first": t.first_stage_layers or None, "last": t.last_stage_layers or None}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        activation_func=F.gelu,
        hidden_dropout=plan.dropout.hidden,
        attention_dropout=plan.dropout.attention,
        layernorm_epsilon=1e-5,
        init_method_std=STD,
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
        **{f"num_layers_in_{end}_pipeline_stage": layers for end, layers in own.items()},
        # With two stages and batched p2p, interleaving trains wrong without an error (seen in megatron-core 0.16.1).
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        cuda_graph_scope=[],  # its own default is deprecated and says so
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
    """The layers of this pipeline rank's chunk `vp_stage`, with the embedding or the head where they belong."""
    model = empty_chunk(plan, settings, vp_stage)
    fill(model, plan)
    return model.cuda() if torch.cuda.is_available() else model


def empty_chunk(plan: Plan, settings: TransformerConfig, vp_stage: int | None) -> GPTModel:
    """The same chunk where megatron-core made it, its values not yet written."""
    shape = plan.shape
    where = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    model = GPTModel(
        config=settings,
        transformer_layer_spec=block_spec(settings, vp_stage),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="learned_absolute",
        vp_stage=vp_stage,
    )
    if shape.embedding_layernorm and model.pre_process:
        # The dropout is the embedding's last act, on what this rank holds of the sequence.
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


def fill(model: GPTModel, plan: Plan, whole: Whole = nullcontext) -> None:
    """Give every parameter its slice of the initial state, and megatron-core's marks of how it is cut.

    megatron-core sets those marks while initializing, which we switched off; without them the gradient norm would
    count the cut matrices of one tensor-parallel rank only.
    """
    fill_parameters(canonical_parameters(model, plan.shape.tied_embeddings), plan, whole)


def fill_parameters(named: Iterable[tuple[str, torch.nn.Parameter]], plan: Plan, whole: Whole = nullcontext) -> None:
    """The same for parameters by their names in the whole model; inside `whole` a parameter is at hand unsharded."""
    rank, tp = parallel_state.get_tensor_model_parallel_rank(), plan.topology.tp
    for name, parameter in named:
        dim = split_dim(name)
        if dim is not None and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, dim, 1)
        with torch.no_grad(), whole(parameter):
            parameter.copy_(initial_slice(name, parameter.shape, rank, tp, plan.run.seed, plan.shape))


def canonical_parameters(model: GPTModel, tied: bool) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter with its name in the whole model: layers counted from the first stage, a tied head by its twin."""
    numbers = {str(i): layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        name = name.replace(".embedding_dropout.", ".")
        name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda found: str(numbers[found.group()]), name)
        if tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, parameter
