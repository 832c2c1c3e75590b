"""The `deepspeed-3d` engine: DeepSpeed's pipeline (1F1B) and ZeRO-1 over megatron-core's
tensor-parallel layers.

S sequence (sequence parallelism leaves each rank a part of it between positions and head), B
microbatch, C hidden size, V rows of the vocabulary on this rank. The layers' class names matter:
the partition "type:transformer|embedding" counts those whose name contains one of the two words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from trilane.config.model import ModelShape
from trilane.config.plan import Plan
from trilane_engine import patches
from trilane_engine.backends.base import Microbatch, Named
from trilane_engine.backends.deepspeed_zero import DeepSpeed
from trilane_engine.model.fused import apply, token_losses
from trilane_engine.model.gpt import (
    Norm,
    NormedDropout,
    fill_parameters,
    layer_spec,
    transformer_config,
)
from trilane_engine.model.rng import sequence_stream
from trilane_engine.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, P2P, REDUCE, phase

# of DeepSpeed's instructions; all others send and receive
PHASES = {
    "LoadMicroBatch": DATA,
    "ForwardPass": FORWARD,
    "BackwardPass": BACKWARD,
    "OptimizerStep": OPTIMIZER,
    "ReduceGrads": REDUCE,
    "ReduceTiedGrads": REDUCE,
}


class DeepSpeed3D(DeepSpeed):
    """TP, PP and DP of one plan; every rank gets the loss."""

    def _initialize(self, ds_config: dict[str, Any]) -> Named:
        stage = self._stage()
        named = list(canonical_parameters(stage))
        fill_parameters(named, self._plan)
        self._wrap(stage, named, ds_config)
        patches.wrap_instructions(self._engine, lambda name, f: phase(PHASES.get(name, P2P))(f))
        t = self._plan.topology
        held = [layer for layer in stage.forward_funcs if isinstance(layer, TransformerLayer)]
        for number, layer in enumerate(held):
            layer.recomputed = t.recompute == "full" or number < t.recompute_layers
        return named

    def _train(self, microbatches: Sequence[Microbatch]) -> float:
        return self._engine.train_batch(iter([(m.tokens, m.labels) for m in microbatches])).item()

    def _evaluate(self, microbatches: Sequence[Microbatch]) -> float:
        feed = iter([(m.tokens, m.labels) for m in microbatches])
        return self._engine.eval_batch(feed, num_micro_batches=len(microbatches)).item()

    def _stage(self) -> PipelineModule:
        """This rank's layers, not yet initialized."""
        plan = self._plan
        t = plan.topology
        # Layers inside DeepSpeed's pipeline must see pp 1: megatron-core would shift their numbers
        # otherwise.
        alone = replace(
            t,
            pp=1,
            recompute="none",
            recompute_layers=0,
            offload_checkpoints=False,
            partition="uniform",
        )
        one_stage = replace(plan, topology=alone)
        # DeepSpeed's own "uniform" would count embedding, positions and norm as layers.
        if t.partition == "uniform":
            method = "type:transformer"
        else:
            method = t.partition
        return PipelineModule(
            layers(plan, apply(self._kernels, transformer_config(one_stage))),
            topology=PipeModelDataParallelTopology(num_pp=t.pp, num_mp=t.tp, num_dp=t.dp),
            loss_fn=partial(mean_loss, fused=self._kernels.fused),
            partition_method=method,
        )


build = DeepSpeed3D


class WordEmbedding(tensor_parallel.VocabParallelEmbedding):
    """Token ids (B, S) -> (S, B, C)."""

    prefix = "embedding.word_embeddings."

    def __init__(self, plan: Plan, settings: TransformerConfig) -> None:
        shape = plan.shape
        super().__init__(
            shape.vocab_size, shape.hidden_size, init_method=settings.init_method, config=settings
        )
        self.parallel = settings.sequence_parallel
        self.ranks = settings.tensor_model_parallel_size

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).transpose(0, 1).contiguous()

    def logits(self, x: Tensor) -> Tensor:
        """(S, B, C) -> (S, B, V): the matrix as the head."""
        return linear_with_grad_accumulation_and_async_allreduce(
            input=x,
            weight=self.weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=self.ranks > 1 and not self.parallel,
            sequence_parallel=self.parallel,
        )


class HeadEmbedding(WordEmbedding):
    """The output head as its own matrix, for embeddings that are not tied."""

    prefix = "output_layer."
    forward = WordEmbedding.logits  # type: ignore[assignment]


class Positions(nn.Module):
    """Adds the learned positions, where there are some; then the embedding's dropout, unless a norm
    comes between.
    """

    prefix = "embedding.position_embeddings."
    weight: nn.Parameter | None

    def __init__(self, plan: Plan, settings: TransformerConfig) -> None:
        super().__init__()
        size = (plan.shape.seq_length, plan.shape.hidden_size)
        table = nn.Parameter(torch.empty(size, dtype=settings.params_dtype))
        self.register_parameter("weight", table if plan.shape.positions == "learned" else None)
        self.settings = settings
        self.dropout = 0.0 if plan.shape.embedding_layernorm else settings.hidden_dropout

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, C) -> (S, B, C)."""
        if self.weight is not None:
            x = x + self.weight[: x.size(0), None]
        if self.settings.sequence_parallel:
            # a view, which would keep the whole sequence for the backward pass
            x = tensor_parallel.scatter_to_sequence_parallel_region(x).clone()
        with sequence_stream(self.settings):
            return F.dropout(x, self.dropout, self.training)


class FirstNorm(NormedDropout):
    """BLOOM's norm of the embedding, and its dropout. With `embedding` in its name it would be
    counted as one.
    """

    prefix = "embedding."

    def forward(self, x: Tensor) -> Tensor:
        with sequence_stream(self.settings):
            return super().forward(x)


class TransformerLayer(nn.Module):
    """Layer `number` of the whole model, from 0; `recomputed` in the backward pass or not."""

    recomputed = False

    def __init__(self, shape: ModelShape, settings: TransformerConfig, number: int) -> None:
        super().__init__()
        self.prefix = f"decoder.layers.{number}."
        self.settings = settings
        # Numbered from 1 in the whole model; `settings` describe no pipeline, or this stage's
        # offset would count twice.
        self.layer = build_module(
            layer_spec(shape, settings), config=settings, layer_number=number + 1
        )

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, C) -> (S, B, C)."""
        # DeepSpeed's own checkpoints do not rewind the generators of megatron-core's dropout, and
        # take every layer
        if self.recomputed:
            return self._checkpointed_forward(x)
        return self._computed(x)

    def _checkpointed_forward(self, x: Tensor) -> Tensor:
        return tensor_parallel.checkpoint(self._computed, False, x)

    def _computed(self, x: Tensor) -> Tensor:
        with sequence_stream(self.settings):  # as megatron-core's TransformerBlock does
            return self.layer(hidden_states=x, attention_mask=None)[0]


class FinalNorm(nn.Module):
    """The norm after the last layer."""

    prefix = "decoder.final_layernorm."

    def __init__(self, settings: TransformerConfig) -> None:
        super().__init__()
        self.layer = Norm(settings, settings.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def mean_loss(scores: Tensor, labels: Tensor, fused: bool) -> Tensor:
    """Mean cross-entropy in nats; scores (S, B, V), labels (B, S)."""
    return token_losses(scores, labels.transpose(0, 1).contiguous(), fused).mean()


def layers(plan: Plan, settings: TransformerConfig) -> list[LayerSpec]:
    """Every layer of the whole model; a stage builds only its share."""
    shape = plan.shape
    first = LayerSpec(WordEmbedding, plan, settings)
    last = LayerSpec(HeadEmbedding, plan, settings)
    if shape.tied_embeddings:
        tied = partial(TiedLayerSpec, "embedding", WordEmbedding, plan, settings)
        first = tied()
        last = tied(forward_fn=WordEmbedding.logits)
    specs = [first, LayerSpec(Positions, plan, settings)]
    if shape.embedding_layernorm:
        specs.append(LayerSpec(FirstNorm, settings))
    for number in range(shape.num_layers):
        specs.append(LayerSpec(TransformerLayer, shape, settings, number))
    return [*specs, LayerSpec(FinalNorm, settings), last]


def canonical_parameters(stage: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter of a stage with its name in the whole model."""
    for module in stage.modules():
        prefix = getattr(module, "prefix", None)
        if prefix is not None:
            for name, parameter in module.named_parameters():
                yield prefix + name.removeprefix("layer."), parameter
