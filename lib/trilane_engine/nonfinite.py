"""The first value of an iteration that is not finite: its batch is repeated once, with hooks that
look at what modules give.

Looked at are the weights, outputs of modules, and gradients of these: nothing between the
operations inside a module, and no sums of gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from trilane_engine import patches
from trilane_engine.model.gpt import whole_name

Place = tuple[int, ...]  # in the dataflow: the least is the first
WEIGHTS, FORWARD, BACKWARD, NOWHERE = range(4)
NOTHING = "repeated, each value is finite: a sum of gradients overflows, or a device is faulty"


def first_of(chunks: Sequence[nn.Module], repeat: Callable[[], object]) -> str:
    """Where a value arises that is not finite, while `repeat()` computes the batch's gradients
    again; collective.

    `chunks` are this rank's of the model.
    """
    watch = Watch(chunks, dist.get_rank())
    # what is compiled calls no hooks
    with torch.compiler.set_stance("force_eager"), torch.enable_grad():
        repeat()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, watch.end())
    return min(every)[1]


class Watch:
    """What is seen of this rank's chunks, by hooks until the end()."""

    def __init__(self, chunks: Sequence[nn.Module], rank: int) -> None:
        self._rank = rank
        self._seen: list[tuple[Place, str]] = [((NOWHERE,), NOTHING)]
        self._microbatch = [-1] * len(chunks)  # in each
        self._hooks: list[Any] = []
        for number, chunk in enumerate(chunks):
            self._hooks.append(chunk.register_forward_pre_hook(partial(self._begin, number)))
            for name, module in named(chunk):
                self._hooks.append(module.register_forward_hook(partial(self._gives, number, name)))
                for part, weight in module.named_parameters(recurse=False):
                    self._look((WEIGHTS, number, rank), f"{name}.{part}", weight)

    def end(self) -> tuple[Place, str]:
        """The first place, and what is there."""
        for hook in self._hooks:
            hook.remove()
        return min(self._seen)

    def _begin(self, number: int, *_: Any) -> None:
        self._microbatch[number] += 1

    def _gives(self, number: int, name: str, module: nn.Module, given: Any, out: Any) -> None:
        microbatch = self._microbatch[number]
        forward = f"the output of {name}, forward pass of microbatch {microbatch}"
        backward = f"the gradient of the output of {name}, backward pass"
        for tensor in patches.tensors_of(out):
            self._look((FORWARD, microbatch, number, self._rank), forward, tensor)
            if tensor.requires_grad:
                place = (BACKWARD, -number, -self._rank)
                tensor.register_hook(partial(self._look, place, backward))

    def _look(self, place: Place, what: str, tensor: Tensor) -> None:
        """Keep it where it has a value that is not finite; of one place the first counts."""
        if not tensor.isfinite().all():
            kind = "NaN" if tensor.isnan().any() else "Inf"
            text = f"{kind} in {what} on rank {self._rank}, {tensor.dtype}"
            self._seen.append(((*place, len(self._seen)), text))


def named(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the model in a chunk by their names, layers counted from 0 over all stages."""
    model: Any = unwrap_model(chunk)  # of DDP, and of half precision
    for name, module in model.named_modules():
        if name:
            yield whole_name(model, name), module
