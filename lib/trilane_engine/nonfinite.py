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
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from trilane_engine import patches
from trilane_engine.model.gpt import whole_name

WEIGHTS = -1  # as a microbatch, before the first


class Seen(NamedTuple):
    """A value that is not finite. The least is the first in the dataflow of the first microbatch
    that has one.
    """

    microbatch: int
    backward: bool
    place: int  # of the chunk among those of all stages, in the order of the pass
    order: int  # of the tensor among those that the rank has looked at
    rank: int
    text: str


NOTHING = "repeated, each value is finite: a sum of gradients overflows, or a device is faulty"
UNSEEN = Seen(1 << 40, True, 0, 0, 0, NOTHING)


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
        # the microbatch in each chunk
        self._forward = [-1] * len(chunks)
        self._backward = [0] * len(chunks)
        self._looked = 0
        self._hooks: list[Any] = []
        for number, chunk in enumerate(chunks):
            self._hooks.append(chunk.register_forward_pre_hook(partial(self._begin, number)))
            for name, module in named(chunk):
                gives = partial(self._gives, number, f"the output of {name}")
                self._hooks.append(module.register_forward_hook(gives))
                for part, weight in module.named_parameters(recurse=False):
                    self._look(number, WEIGHTS, False, f"{name}.{part}", weight)

    def end(self) -> None:
        """Look at nothing more."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, number: int, *_: Any) -> None:
        self._forward[number] += 1

    def _gives(self, number: int, what: str, module: nn.Module, given: Any, out: Any) -> None:
        """Look at the tensors that a module gives now, and at their gradients when they come."""
        recomputes = patches.runs_backward()
        microbatch = (self._backward if recomputes else self._forward)[number]
        for tensor in patches.tensors_of(out):
            self._look(number, microbatch, False, what, tensor)
            if tensor.requires_grad:
                look = partial(self._look, number, microbatch, True, f"the gradient of {what}")
                tensor.register_hook(look)

    def _look(
        self, number: int, microbatch: int, backward: bool, what: str, tensor: Tensor
    ) -> None:
        """Keep the first value that is not finite."""
        if backward:
            self._backward[number] = microbatch
        self._looked += 1
        if tensor.isfinite().all():
            return
        # chunks follow one another over the stages, backward from the last
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        place = number * stages + parallel_state.get_pipeline_model_parallel_rank()
        place = -place if backward else place
        kind = "NaN" if tensor.isnan().any() else "Inf"
        when = "before the batch"
        if microbatch != WEIGHTS:
            direction = "backward" if backward else "forward"
            when = f"{direction} pass of microbatch {microbatch}"
        text = f"{kind} in {what}, {when} on rank {self._rank}, {tensor.dtype}"
        seen = Seen(microbatch, backward, place, self._looked, self._rank, text)
        self.first = min(self.first, seen)


def named(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the model in a chunk by their names, layers counted from 0 over all stages."""
    model: Any = unwrap_model(chunk)  # of DDP, and of half precision
    for name, module in model.named_modules():
        if name:
            yield whole_name(model, name), module
