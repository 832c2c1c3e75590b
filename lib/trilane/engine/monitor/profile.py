"""`run.profile`: a trace of some iterations by torch's profiler, and the seconds of each part of the model.

Only the chosen ranks record, and only in these iterations: hooks on the modules name the parts, and are removed after.
An operator of the backward pass belongs to the part of the operator whose gradient it computes (torch numbers both
alike). On a GPU the seconds are those of the kernels, each counted for the operator that launched it.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from trilane.config.plan import Plan
from trilane.engine.distributed.world import World
from trilane.engine.monitor import phases
from trilane.workspace.profiles import FOLDER, HEAD, MARK, Operator, Profile, kind_of, write_profile

# The last word of a module's name that has one of these -> its part; the first that fits.
PARTS = {
    "attention": ("self_attention", "attn"),
    "MLP": ("mlp",),
    "norms": ("layernorm", "ln_1", "ln_2", "ln_f", "norm"),
    "embedding": ("embedding", "word_embeddings", "position_embeddings", "wte", "wpe"),
    HEAD: ("output_layer", "lm_head"),
}
PHASES = {phases.OPTIMIZER: "optimizer", phases.REDUCE: "communication", phases.P2P: "communication"}
BACKWARD = "autograd::engine::evaluate_function"


class Profiler:
    """The trace of a rank, begun before iteration `first` of run.profile and written after its `last`."""

    def __init__(self, plan: Plan, world: World, folder: Path, modules: Sequence[torch.nn.Module], done: int) -> None:
        self._plan, self._world, self._folder, self._modules = plan, world, folder, modules
        window = plan.run.profile_window
        passed = window is not None and done >= window.last
        self.note = f"profile={plan.run.profile}: {done} iterations are done, nothing is profiled" if passed else ""
        chosen = (window.ranks or (0, world.size - 1)) if window and not passed else ()
        self._window = window if world.rank in chosen else None
        self._undo: list[Callable[[], None]] = []
        self._trace: Any = None
        self._first, self._begin = 0, 0.0  # iteration and time of the trace's beginning

    def before(self, iteration: int) -> None:
        """Begin where the iteration is the first of the window, or a run resumes inside it."""
        window = self._window
        if window is None or self._trace is not None or not window.first <= iteration <= window.last:
            return
        self._first = iteration
        self._mark_modules()
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (self._world.device.type == "cuda")]
        self._trace = torch.profiler.profile(activities=activities, acc_events=True)
        self._trace.__enter__()
        self._begin = time.perf_counter()

    def after(self, iteration: int) -> bool:
        """End where the iteration is the last of the window; whether a trace was written, which takes its time."""
        if self._window is None or self._trace is None or iteration < self._window.last:
            return False
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._begin
        self._trace.__exit__(None, None, None)
        for undo in self._undo:
            undo()
        (self._folder / FOLDER).mkdir(exist_ok=True)
        self._trace.export_chrome_trace(str(self._folder / FOLDER / f"{self._world.rank}.trace.json.gz"))
        found = summary(self._trace.events(), self._world.device.type == "cuda")
        count = iteration - self._first + 1
        profile = Profile(
            rank=self._world.rank,
            device=str(self._world.device.type),
            first=self._first,
            last=iteration,
            seconds=seconds / count,
            operators=tuple(sorted((o.per_iteration(count) for o in found), key=lambda o: -o.seconds)),
        )
        write_profile(self._folder, profile)
        self._window, self._trace, self._undo = None, None, []
        return True

    def _mark_modules(self) -> None:
        """Name the part of each module while it computes, and of each phase outside the model."""
        for model in self._modules:
            for name, module in model.named_modules():
                part = part_of(name)
                if part:
                    self._mark(module, part)
        self._undo.append(phases.subscribe(self._phase()))

    def _mark(self, module: torch.nn.Module, part: str) -> None:
        inside: list[Any] = []

        def enter(*_: Any) -> None:
            inside.append(record_function(MARK + part))
            inside[-1].__enter__()

        def leave(*_: Any) -> None:
            inside.pop().__exit__(None, None, None)

        handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
        self._undo += [handle.remove for handle in handles]

    def _phase(self) -> Callable[[str], None]:
        open_range = contextlib.ExitStack()

        def changed(name: str) -> None:
            open_range.close()
            if name in PHASES:
                open_range.enter_context(record_function(MARK + PHASES[name]))

        self._undo.append(open_range.close)
        return changed


def part_of(name: str) -> str:
    """The part that a module of that name is, "" for none: the outermost module of a part decides."""
    last = name.rpartition(".")[2]
    return next((part for part, words in PARTS.items() if any(_is(last, word) for word in words)), "")


def _is(last: str, word: str) -> bool:
    return last == word or (word in ("layernorm", "norm") and last.endswith(word))


def summary(events: Iterable[Any], cuda: bool) -> list[Operator]:
    """Seconds and calls of every operator by part, over the whole window.

    On a CPU an operator's own time on the threads that compute, without what it calls; collectives of other threads
    overlap with it and are left out.
    """
    every = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    parts = _parts(every)
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    threads = {event.thread for event in every if event.name.startswith(("aten::", MARK))}
    for event in every:
        if event.name.startswith((MARK, BACKWARD)) and not (cuda and event.kernels):
            name = "autograd and Python"
        else:
            name = event.name
        kernels = event.kernels if cuda else ()
        micros = sum(kernel.duration for kernel in kernels) if cuda else event.self_cpu_time_total
        if not micros or (not cuda and event.thread not in threads):
            continue
        total = totals[parts[event.id], name]
        total[0] += micros / 1e6
        total[1] += 1
    return [Operator(part=p, name=n, kind=kind_of(p, n), seconds=s, calls=int(c)) for (p, n), (s, c) in totals.items()]


def _parts(events: Sequence[Any]) -> dict[int, str]:
    """The part of each event by its id."""
    found: dict[int, str] = {}
    forward: dict[tuple[int, int], str] = {}  # by thread, and the number that torch counts there
    later: list[Any] = []
    for event in sorted(events, key=lambda e: e.time_range.start):
        part, backward = _enclosing(event)
        if part:
            found[event.id] = part
            if event.sequence_nr >= 0 and not backward:
                forward.setdefault((event.thread, event.sequence_nr), part)
        else:
            later.append((event, backward))
    for event, backward in later:
        source = (backward.fwd_thread, backward.sequence_nr) if backward is not None else (0, -1)
        found[event.id] = forward.get(source, "other")
    return found


def _enclosing(event: Any) -> tuple[str, Any]:
    """The innermost part around an event, "" for none, and the node of the backward pass that it runs in."""
    if is_communication(event.name):
        return "communication", None
    while event is not None:
        if event.name.startswith(MARK):
            return event.name.removeprefix(MARK), None
        if event.name.startswith(BACKWARD):
            return "", event
        event = event.cpu_parent
    return "", None


def is_communication(name: str) -> bool:
    """Whether an operator or kernel sends or receives."""
    return name.startswith(("c10d::", "gloo:", "nccl", "record_param_comms"))
