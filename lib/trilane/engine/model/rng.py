"""Generators: the state of every random number generator of this rank, as text.

Which random numbers dropout draws: seeds that differ where masks must differ, and nowhere else.

megatron-core has two streams. Hidden values that every tensor-parallel rank holds whole are masked by the default one,
which must be the same on all ranks of the group; what they share out (heads, or a part of the sequence) by the
tensor-parallel one, which must not. A pipeline stage and a replica have streams of their own: Megatron-LM gives
replicas the same masks unless it is asked not to, so that samples at the same place of two replicas lose alike.
"""

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


def states() -> dict[str, Any]:
    """torch's generators and those that megatron-core keeps for tensor parallelism, each as hexadecimal bytes."""
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "cpu": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()),
        "tracked": {name: _text(state) for name, state in tracked.items()},
    }


def restore(said: dict[str, Any]) -> None:
    """Put every generator back to where it was."""
    torch.set_rng_state(_state(said["cpu"]))
    if torch.cuda.is_available():  # without a GPU megatron-core was told that the CPU's generator is the card's
        torch.cuda.set_rng_state(_state(said["cuda"]))
    tensor_parallel.get_cuda_rng_tracker().set_states({n: _state(text) for n, text in said["tracked"].items()})


def _text(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


# Further apart than megatron-core's own offset for the tensor-parallel stream, 2718 + rank.
STAGE, REPLICA = 10**5, 10**8


def seed_streams(seed: int) -> None:
    """Seed both streams of this rank for its stage and replica; megatron-core's groups must stand."""
    stage, replica = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    model_parallel_cuda_manual_seed(own_seed(seed, stage, replica))


def own_seed(seed: int, stage: int, replica: int) -> int:
    """The seed of a stage's replica; the same for all its tensor-parallel ranks."""
    return seed + STAGE * stage + REPLICA * replica
