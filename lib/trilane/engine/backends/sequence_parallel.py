"""Sequence parallelism where megatron-core's own training loop is not there to finish it."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig


def sum_shared_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum over the tensor-parallel ranks the gradients of what each holds whole and uses on its part of a sequence.

    megatron-core marks those parameters and sums once an iteration, in finalize_model_grads. DeepSpeed knows neither,
    and puts a gradient into its buckets as soon as it is there: so it is summed before, once a microbatch.
    """
    for parameter in parameters:
        if getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(_summed)


def _summed(gradient: torch.Tensor) -> torch.Tensor:
    whole = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=parallel_state.get_tensor_model_parallel_group())
    return whole


def own_stream(settings: TransformerConfig) -> AbstractContextManager[Any]:
    """Draw from this rank's own stream inside: where ranks share out a sequence, their dropout masks must differ."""
    return tensor_parallel.get_cuda_rng_tracker().fork() if settings.sequence_parallel else nullcontext()
