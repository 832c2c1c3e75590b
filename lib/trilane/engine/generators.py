"""Generators: the state of every random number generator of this rank, as text."""

from typing import Any

import torch
from megatron.core import tensor_parallel


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
