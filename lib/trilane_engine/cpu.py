"""What lets megatron-core, which hard-codes 'cuda', run without a GPU; with one nothing
is changed.
"""

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

COMPILE = torch.compile  # enable_cpu() replaces it


@functools.cache
def enable_cpu() -> None:
    """Make megatron-core importable without warnings and, without a GPU, runnable. Call before
    importing megatron.
    """
    for message in (
        # torch's own optimizer, norm and attention are used on purpose.
        "(Transformer Engine and Apex are|Apex is) not installed|"
        "If you are using transformer_engine as",
        # megatron-core 0.19's, on imports of which nothing here runs
        "absl.logging is not installed|MimoModelConfig is experimental",
        # torch 2.13 renames the collectives that megatron-core 0.16.1 and DeepSpeed 0.19.8 call.
        r"`torch\.distributed\.\w+` is deprecated",
        # so have layers whose experts are whole on each rank
        "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
        # megatron-core's distributed optimizer does so.
        "The .grad attribute of a Tensor that is not a leaf",
    ):
        warnings.filterwarnings("ignore", message=message)
    # megatron-core 0.19 warns that new features come to HybridModel alone
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    if torch.cuda.is_available():
        return
    # else DeepSpeed prints on every rank that it found no GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # A CUDA build of torch warns on every rank, at its import, where CUDA's compiler is installed
    # without a GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # The import of the compiler alone takes 1.5 s a process, and nothing here fuses.
    whole: Any = torch
    whole.compile = lambda model=None, **options: (
        (lambda function: function) if model is None else model
    )
    from megatron.core.tensor_parallel import random as megatron_random

    for name in ("tensor", "zeros", "ones"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda device=None: None
    # DDP of megatron-core asks for them, of 0.19 before each reduction
    cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda device=None: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: (
        torch.set_rng_state(state)
    )
    # It warns at each dropout that the default generator advanced: on a CPU there is only one.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    tensor: Any = torch.Tensor
    plain = tensor.type
    # megatron-core's optimizers look for 'torch.cuda.FloatTensor'.

    def type_as_on_cuda(self: torch.Tensor, *to: Any, **options: Any) -> Any:
        if to or options:
            return plain(self, *to, **options)
        return plain(self).replace("torch.", "torch.cuda.", 1)

    tensor.type = type_as_on_cuda
    tensor.cuda = lambda self, *args, **options: self


class _Stream(SimpleNamespace):
    """In place of torch.cuda's: a CPU computes in order."""

    def wait_stream(self, stream: Any) -> None: ...


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*args, **options)

    return made
