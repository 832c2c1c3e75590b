"""What lets megatron-core, which hard-codes 'cuda', run without a GPU; with one nothing is changed."""

import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

COMPILE = torch.compile  # enable_cpu() replaces it
# megatron-core warns so in four modules. torch's own optimizer and norm are used on purpose, and the attention that
# selective recomputation repeats is not Transformer Engine's.
EXPECTED = "(Transformer Engine and Apex are|Apex is) not installed|If you are using transformer_engine as"


@functools.cache
def enable_cpu() -> None:
    """Make megatron-core importable without warnings and, without a GPU, runnable. Call before importing megatron.

    megatron-core 0.16.1 needs each of the replaced functions (without any one training fails); the list grows with its
    releases, so the pin in requirements.txt matters.
    """
    warnings.filterwarnings("ignore", message=EXPECTED)
    # torch 2.13 renames the collectives that megatron-core 0.16.1 and DeepSpeed 0.19.8 call.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    # megatron-core's distributed optimizer reads the gradient of tensors that are not leaves.
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning
    )
    if torch.cuda.is_available():
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed prints on every rank that it found no GPU
    _skip_compiler()
    from megatron.core.tensor_parallel import random as megatron_random

    for name in ("tensor", "zeros", "ones"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda device=None: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # It warns at each dropout that the default generator advanced: on a CPU there is only one.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    _cuda_tensor_names()


def _skip_compiler() -> None:
    """Make torch.compile return functions unchanged: its import alone takes 1.5 s a process, and nothing here fuses."""
    compiler: Any = torch
    compiler.compile = lambda model=None, **options: (lambda function: function) if model is None else model


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*args, **options)

    return made


def _cuda_tensor_names() -> None:
    """Tensor.type() returns 'torch.cuda.FloatTensor' for megatron-core's optimizers; Tensor.cuda() does nothing."""
    tensor: Any = torch.Tensor
    plain = tensor.type

    def named(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if args or options:
            return plain(self, *args, **options)
        return plain(self).replace("torch.", "torch.cuda.", 1)

    tensor.type = named
    tensor.cuda = lambda self, *args, **options: self
