"""The first value of an iteration that is not finite: its batch is repeated once, with hooks that
look at all tensors.

Looked at are what modules take and give, and the gradients of both: nothing between the operations
inside a module.
"""

import contextlib
import math
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

Pass = tuple[int, int, bool]  # through a chunk of the model, by a microbatch, backward


class Seen(NamedTuple):
    """A value that is not finite. The least is the first in the dataflow of the first microbatch
    that has one.

    Where several ranks see it in one place, as a sum over tensor ranks reaches all, it is the one
    with bad weights.
    """

    microbatch: int
    backward: bool
    place: int  # of the chunk among those of all stages, in the order of the pass
    order: int  # of the tensor among those that the rank has looked at
    by_data: bool  # the weights of the module are finite
    rank: int
    text: str


NOTHING = "repeated, the batch is finite everywhere: a fault of a device or link?"
UNSEEN = Seen(1 << 40, True, 0, 0, True, 0, NOTHING)


def first_of(chunks: Sequence[nn.Module], repeat: Callable[[], object]) -> str:
    """Where a value arises that is not finite, while `repeat()` computes the batch's gradients
    again; collective.

    `chunks` are this rank's of the model.
    """
    watch = Watch(chunks, dist.get_rank())
    # what is compiled calls no hooks
    with watch.hooks(), torch.compiler.set_stance("force_eager"), torch.enable_grad():
        repeat()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tuple(min(watch.first, watch.of_weights())))
    return Seen(*min(every)).text


class Watch:
    """What hooks on the modules of this rank's chunks have seen."""

    def __init__(self, chunks: Sequence[nn.Module], rank: int) -> None:
        self._chunks = chunks
        self._rank = rank
        self.first = UNSEEN
        # the microbatch in each chunk
        self._forward = [-1] * len(chunks)
        self._backward = [0] * len(chunks)
        self._looked = 0

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Look at everything as long as the block lasts."""
        with contextlib.ExitStack() as stack:
            for number, chunk in enumerate(self._chunks):
                stack.enter_context(chunk.register_forward_pre_hook(partial(self._begin, number)))
                for name, module in named(chunk):
                    takes = partial(self._see, number, f"the input of {name}")
                    gives = partial(self._gives, number, f"the output of {name}")
                    stack.enter_context(module.register_forward_pre_hook(takes, with_kwargs=True))
                    stack.enter_context(module.register_forward_hook(gives))
            yield

    def of_weights(self) -> Seen:
        """A sum of weight gradients that is not finite, of which no single value was."""
        for number, chunk in enumerate(self._chunks):
            for name, weight in chunk.named_parameters():
                gradient = getattr(weight, "main_grad", weight.grad)
                if gradient is not None and not math.isfinite(largest(gradient)):
                    text = f"{kind(gradient)} in the gradient of {name}, summed over microbatches"
                    last = UNSEEN.microbatch - 1
                    return UNSEEN._replace(
                        microbatch=last, order=number, rank=self._rank, text=f"{text} and replicas"
                    )
        return UNSEEN

    def _begin(self, number: int, *_: Any) -> None:
        self._forward[number] += 1

    def _gives(self, number: int, what: str, module: nn.Module, _: Any, out: Any) -> None:
        self._see(number, what, module, out)

    def _see(self, number: int, what: str, module: nn.Module, *values: Any) -> None:
        """Look at the tensors that a module takes or gives now, and at their gradients when they
        come.
        """
        recomputes = patches.runs_backward()
        microbatch = (self._backward if recomputes else self._forward)[number]
        for tensor in patches.tensors_of(values):
            # a tied head takes its weight, whose gradients are those of all microbatches
            if not tensor.is_floating_point() or isinstance(tensor, nn.Parameter):
                continue
            self._look((number, microbatch, False), what, module, tensor)
            if tensor.requires_grad:
                at = (number, microbatch, True)
                tensor.register_hook(partial(self._look, at, f"the gradient of {what}", module))

    def _look(self, at: Pass, what: str, module: nn.Module, tensor: Tensor) -> None:
        """Keep the first value that is not finite."""
        number, microbatch, backward = at
        if backward:
            self._backward[number] = microbatch
        self._looked += 1
        if math.isfinite(largest(tensor)):
            return
        bad = ""
        for name, weight in module.named_parameters(recurse=False):
            if not bad and not math.isfinite(largest(weight)):
                bad = name
        place = _place(number, backward)
        seen = Seen(microbatch, backward, place, self._looked, not bad, self._rank, "")
        if seen > self.first:
            return
        precision = str(tensor.dtype).removeprefix("torch.")
        why = f"{precision} ends at {torch.finfo(tensor.dtype).max:.3g}"
        if bad:
            why = f"its {bad} is not finite"
        direction = "backward" if backward else "forward"
        during = f"{direction} pass of microbatch {microbatch} on rank {self._rank}"
        self.first = seen._replace(text=f"{kind(tensor)} in {what}, {during}: {why}")


def _place(number: int, backward: bool) -> int:
    """Of this rank's chunk among those of all stages: forward from the first, backward from the
    last.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    place = number * stages + parallel_state.get_pipeline_model_parallel_rank()
    return -place if backward else place


def named(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the model in a chunk by their names, layers counted from 0 over all stages."""
    model: Any = unwrap_model(chunk)  # of DDP, and of half precision
    for name, module in model.named_modules():
        if name:
            yield whole_name(model, name), module


def largest(tensor: Tensor) -> float:
    """The largest magnitude, inf or NaN where a value is; 0 of none."""
    if tensor.numel():
        return torch.linalg.vector_norm(tensor.detach(), math.inf).item()
    return 0.0


def kind(tensor: Tensor) -> str:
    """What is not finite in a tensor."""
    return "NaN" if tensor.isnan().any() else "Inf"
