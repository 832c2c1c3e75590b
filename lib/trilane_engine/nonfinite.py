"""The first value of an iteration that is not finite: its batch is repeated once, with hooks that
look at all tensors.

Looked at are the weights, then what modules give and its gradients: nothing between the operations
inside a module, and no sums of gradients over microbatches or replicas.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from trilane_engine import patches
from trilane_engine.model.gpt import whole_name


class Seen(NamedTuple):
    """A value that is not finite. The least is the first in the dataflow: forward passes do not
    depend on the gradients of the batch.
    """

    backward: bool
    microbatch: int  # of a forward pass; -1 before the first, and 0 backward
    chunk: int  # in the order of the pass, and so its rank: ranks follow one another by stage
    rank: int
    order: int  # of the tensor among those that the rank has looked at
    text: str


NOTHING = "repeated, each value is finite: a sum of gradients overflows, or a device is faulty"
UNSEEN = Seen(True, 1, 0, 0, 0, NOTHING)


def first_of(chunks: Sequence[nn.Module], repeat: Callable[[], object]) -> str:
    """Where a value arises that is not finite, while `repeat()` computes the batch's gradients
    again; collective.

    `chunks` are this rank's of the model.
    """
    watch = Watch(chunks, dist.get_rank())
    # what is compiled calls no hooks
    with torch.compiler.set_stance("force_eager"), torch.enable_grad():
        repeat()
    watch.end()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tuple(watch.first))
    return Seen(*min(every)).text


class Watch:
    """What hooks on the modules of this rank's chunks see, until its end()."""

    def __init__(self, chunks: Sequence[nn.Module], rank: int) -> None:
        self._rank = rank
        self.first = UNSEEN
        self._microbatch = [-1] * len(chunks)  # in each
        self._looked = 0
        self._hooks: list[Any] = []
        for number, chunk in enumerate(chunks):
            self._hooks.append(chunk.register_forward_pre_hook(partial(self._begin, number)))
            for name, module in named(chunk):
                gives = partial(self._gives, number, f"the output of {name}")
                self._hooks.append(module.register_forward_hook(gives))
                for part, weight in module.named_parameters(recurse=False):
                    self._look(number, False, f"{name}.{part}", weight)

    def end(self) -> None:
        """Look at nothing more."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, number: int, *_: Any) -> None:
        self._microbatch[number] += 1

    def _gives(self, number: int, what: str, module: nn.Module, given: Any, out: Any) -> None:
        """Look at the tensors that a module gives now, and at their gradients when they come."""
        for tensor in patches.tensors_of(out):
            self._look(number, False, what, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._look, number, True, f"the gradient of {what}"))

    def _look(self, number: int, backward: bool, what: str, tensor: Tensor) -> None:
        """Keep the first value that is not finite."""
        self._looked += 1
        if tensor.isfinite().all():
            return
        place = (number, self._rank)
        microbatch = self._microbatch[number]
        when = f"forward pass of microbatch {microbatch}"
        if backward:
            place = (-number, -self._rank)
            microbatch = 0
            when = "backward pass"
        elif microbatch < 0:
            when = "before the batch"
        kind = "NaN" if tensor.isnan().any() else "Inf"
        text = f"{kind} in {what}, {when} on rank {self._rank}, {tensor.dtype}"
        seen = Seen(backward, microbatch, *place, self._looked, text)
        self.first = min(self.first, seen)


def named(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the model in a chunk by their names, layers counted from 0 over all stages."""
    model: Any = unwrap_model(chunk)  # of DDP, and of half precision
    for name, module in model.named_modules():
        if name:
            yield whole_name(model, name), module
