"""A copy of this rank's state in host memory: a thread writes the checkpoint from it while the training goes on."""

import math
from collections.abc import Iterable, Iterator

import torch

from trilane.engine.checkpoint.fingerprints import Marks
from trilane.engine.model.parameters import States
from trilane.engine.monitor import phases
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.fingerprints import COPY

ALIGNMENT = 64  # values; a tensor begins at a cache line


class HostCopy:
    """A buffer in host memory for the pieces `written` of `states`, taken once, and filled by each take().

    Without a GPU also for what is only fingerprinted, which a GPU does where the state is. On a GPU the buffer is
    page-locked, the copies run on a stream of their own, and the next optimizer step waits for them.
    """

    def __init__(self, states: States, written: Iterable[int], device: torch.device, *, on_host: bool) -> None:
        self._states, self._device = states, device
        self._places: dict[tuple[int, str], tuple[int, int]] = {}
        end, written = 0, set(written)
        for number, piece in enumerate(states.pieces):
            first, last = states.shard(number)
            sizes = dict.fromkeys(KINDS, last - first) if number in written or on_host else {}
            copied = device.type == "cpu" and states.copy(number) is not None
            for kind, size in {**sizes, **({COPY: math.prod(piece.size)} if copied else {})}.items():
                self._places[number, kind] = (end, size)
                end += -(-size // ALIGNMENT) * ALIGNMENT
        self._buffer = _host_memory(end, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        if self._stream:
            phases.subscribe(self._hold_optimizer)

    def take(self, marks: Marks) -> None:
        """Copy the state as it is now, and mark what lies on a GPU; collective where the engine gathers its pieces."""
        self._states.finish_step()
        for number in range(len(self._states.pieces)):
            for kind in KINDS:
                self._take(number, kind, self._states.read(number, kind), marks)
            copy = self._states.copy(number)
            if copy is not None:
                self._take(number, COPY, copy, marks)
        if self._stream:
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def wait(self) -> None:
        """Until the copies are complete; for the thread that reads them."""
        if self._copied:
            torch.cuda.set_device(self._device)  # a thread begins with the first card of the host
            self._copied.synchronize()

    def held(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """What was copied: number of the piece, kind, and its values, flat."""
        for number, kind in self._places:
            yield number, kind, self[number, kind]

    def __getitem__(self, place: tuple[int, str]) -> torch.Tensor:
        first, size = self._places[place]
        return self._buffer[first : first + size]

    def _take(self, number: int, kind: str, values: torch.Tensor, marks: Marks) -> None:
        values = values.detach().reshape(-1)
        if values.is_cuda:
            marks.add(number, kind, values)
        if (number, kind) not in self._places:
            return
        if not values.is_cuda:
            self[number, kind].copy_(values)
            return
        assert self._stream
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self[number, kind].copy_(values, non_blocking=True)
        values.record_stream(self._stream)  # a gathered one is freed here, before it is copied

    def _hold_optimizer(self, phase: str) -> None:
        """Let an optimizer step, on the stream where it runs, wait for the copies; forward and backward need not."""
        if phase == phases.OPTIMIZER and self._copied:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def _host_memory(values: int, device: torch.device) -> torch.Tensor:
    """A buffer of so many fp32 values, with real pages behind it; page-locked with a GPU.

    torch's own page-locked tensors take the next power of two.
    """
    buffer = torch.empty(values, dtype=torch.float32)
    buffer.zero_()
    if device.type == "cuda" and values:
        problem = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        assert not problem, f"cudaHostRegister: error {problem} for {buffer.nbytes} bytes"
    return buffer
