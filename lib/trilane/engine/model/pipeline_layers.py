"""The GPT as a list of layers for DeepSpeed's pipeline: megatron-core's modules in order.

S sequence (sequence parallelism leaves each rank a part of it between positions and head), B microbatch, C hidden size,
V rows of the vocabulary on this rank. The class names matter: partition "type:transformer|embedding" counts the layers
whose class name contains one of the two words.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from trilane.config.model import ModelShape
from trilane.config.plan import Plan
from trilane.engine.model.fused import token_losses
from trilane.engine.model.gpt import Norm, NormedDropout, layer_spec
from trilane.engine.model.rng import sequence_stream
from trilane.workspace.profiles import HEAD, MARK

TIED = "embedding"


class WordEmbedding(tensor_parallel.VocabParallelEmbedding):
    """Token ids (B, S) -> (S, B, C)."""

    prefix = "embedding.word_embeddings."

    def __init__(self, plan: Plan, settings: TransformerConfig) -> None:
        shape = plan.shape
        super().__init__(shape.vocab_size, shape.hidden_size, init_method=settings.init_method, config=settings)
        self.parallel, self.ranks = settings.sequence_parallel, settings.tensor_model_parallel_size

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, S) -> (S, B, C)."""
        return super().forward(tokens).transpose(0, 1).contiguous()


class HeadEmbedding(WordEmbedding):
    """The output head as its own matrix, for embeddings that are not tied."""

    prefix = "output_layer."

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(S, B, C) -> logits (S, B, V)."""
        return logits(self, x)


class Positions(torch.nn.Module):
    """Adds the learned positions, where there are some; then the embedding's dropout, unless a norm comes between."""

    prefix = "embedding.position_embeddings."
    weight: torch.nn.Parameter | None

    def __init__(self, plan: Plan, settings: TransformerConfig) -> None:
        super().__init__()
        size = (plan.shape.seq_length, plan.shape.hidden_size)
        table = torch.nn.Parameter(torch.empty(size, dtype=settings.params_dtype))
        self.register_parameter("weight", table if plan.shape.positions == "learned" else None)
        self.settings = settings
        self.dropout = 0.0 if plan.shape.embedding_layernorm else settings.hidden_dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(S, B, C) -> (S, B, C)."""
        x = x if self.weight is None else x + self.weight[: x.size(0), None]
        if self.settings.sequence_parallel:
            x = tensor_parallel.scatter_to_sequence_parallel_region(x)
        with sequence_stream(self.settings):
            return F.dropout(x, self.dropout, self.training)


class FirstNorm(NormedDropout):
    """BLOOM's norm of the embedding, and its dropout. With `embedding` in its name it would be counted as one."""

    prefix = "embedding."

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(S, B, C) -> (S, B, C)."""
        with sequence_stream(self.settings):
            return super().forward(x)


class TransformerLayer(torch.nn.Module):
    """Layer `number` of the whole model, from 0."""

    def __init__(self, shape: ModelShape, settings: TransformerConfig, number: int) -> None:
        super().__init__()
        self.prefix = f"decoder.layers.{number}."
        self.settings = settings
        # Numbered from 1 in the whole model; `settings` describe no pipeline, or this stage's offset would count twice.
        self.layer = build_module(layer_spec(shape), config=settings, layer_number=number + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(S, B, C) -> (S, B, C)."""
        with sequence_stream(self.settings):  # as megatron-core's TransformerBlock does
            return self.layer(hidden_states=x, attention_mask=None)[0]


class FinalNorm(Norm):
    """The norm after the last layer."""

    prefix = "decoder.final_layernorm."


def logits(embedding: WordEmbedding, x: torch.Tensor) -> torch.Tensor:
    """(S, B, C) -> (S, B, V): the embedding's matrix as the head."""
    with torch.profiler.record_function(MARK + HEAD):
        return linear_with_grad_accumulation_and_async_allreduce(
            input=x,
            weight=embedding.weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=embedding.ranks > 1 and not embedding.parallel,
            sequence_parallel=embedding.parallel,
        )


def mean_loss(scores: torch.Tensor, labels: torch.Tensor, fused: bool, z_loss: float) -> torch.Tensor:
    """Mean cross-entropy in nats; scores (S, B, V), labels (B, S)."""
    return token_losses(scores, labels.transpose(0, 1).contiguous(), fused, z_loss).mean()


def layers(plan: Plan, settings: TransformerConfig) -> list[LayerSpec]:
    """Every layer of the whole model; a stage builds only its share."""
    tied = plan.shape.tied_embeddings
    return [
        TiedLayerSpec(TIED, WordEmbedding, plan, settings) if tied else LayerSpec(WordEmbedding, plan, settings),
        LayerSpec(Positions, plan, settings),
        *[LayerSpec(FirstNorm, settings)] * plan.shape.embedding_layernorm,
        *[LayerSpec(TransformerLayer, plan.shape, settings, number) for number in range(plan.shape.num_layers)],
        LayerSpec(FinalNorm, settings, plan.shape.hidden_size),
        TiedLayerSpec(TIED, WordEmbedding, plan, settings, forward_fn=logits)
        if tied
        else LayerSpec(HeadEmbedding, plan, settings),
    ]


def canonical_parameters(stage: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield each parameter of a stage with its name in the whole model."""
    for module in stage.modules():
        prefix = getattr(module, "prefix", None)
        if prefix is not None:
            for name, parameter in module.named_parameters():
                yield prefix + name.removeprefix("layer."), parameter
