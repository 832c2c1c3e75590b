"""Random number generators of this rank: their states as text, and the seeds that dropout draws
from.

megatron-core has two streams. Hidden values that every tensor-parallel rank holds whole are masked
by the default stream, which must be the same on all ranks of the group; what the ranks divide
(heads, or a part of the sequence) by the tensor-parallel stream, which must differ. Each pipeline
stage and replica has its own streams.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig


def states() -> dict[str, Any]:
    """torch's generators and megatron-core's for tensor parallelism, each state as hexadecimal
    text.
    """
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "cpu": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()),
        "tracked": {name: _text(state) for name, state in tracked.items()},
    }


def restore(states: dict[str, Any]) -> None:
    """Set every generator to its state, as `states()` returned it on a device of this kind."""
    torch.set_rng_state(_state(states["cpu"]))
    # without a GPU enable_cpu() made the CPU's generator stand for the card's
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(_state(states["cuda"]))
    tracked = {name: _state(text) for name, text in states["tracked"].items()}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


def _text(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def seed_streams(seed: int) -> None:
    """Seed both streams of this rank by its stage and replica; megatron-core's groups
    must exist.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    # each part of a sequence has its own
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    # Further apart than megatron-core's own offset for the tensor-parallel stream, 2718 + rank.
    model_parallel_cuda_manual_seed(seed + 10**5 * stage + 10**8 * replica)


def sequence_stream(settings: TransformerConfig) -> AbstractContextManager[Any]:
    """A context that draws from the tensor-parallel stream where ranks divide a sequence: their
    masks must differ.
    """
    if settings.sequence_parallel:
        return tensor_parallel.get_cuda_rng_tracker().fork()
    return nullcontext()
