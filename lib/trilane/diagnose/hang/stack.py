"""Stack dump of one process, independent of the tool that wrote it: Frame, Thread, Dump, and which thread trains.

pyspy.py reads those of py-spy, tracebacks.py Python's own.
"""

import re
from dataclasses import dataclass, field

# Outermost functions of a thread that Python started: never the training thread.
THREAD_STARTS = {"_bootstrap", "_bootstrap_inner"}

# Innermost function of a thread that waits for autograd's engine (torch/autograd/graph.py, autograd/__init__.py), and
# of one that calls the engine itself (megatron/core/pipeline_parallel/schedules.py).
AUTOGRAD = {"_engine_run_backward", "run_backward", "backward", "grad"}
ENGINE_CALLERS = {"custom_backward"}

# Names in the frames of a thread of autograd: functions with a backward, and hooks of parameters.
BACKWARD = re.compile(r"backward|autograd|hook|grad", re.I)

# Ray's worker process (python/ray/_private/workers/default_worker.py), and what runs in it besides the user's function.
RAY = re.compile(r"default_worker\.py$|_private/worker\.py$")
LIBRARY = re.compile(
    r"(?:^|/)(?:ray|_private|_internal|worker_group|concurrent|futures|asyncio|tensorboard|wandb|tqdm|grpc|"
    r"prometheus_client|opentelemetry)/|(?:^|/)(?:threading|queue|selectors|socket|pin_memory|_?monitor)\.py$|^<"
)

LONGEST = 400  # characters of a name that are kept

Key = tuple[str, str, int]  # function, file without its folders, line


@dataclass(frozen=True, order=True)
class Frame:
    """A stack frame: the function without its class, the end of the file's path, the line."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def key(self) -> Key:
        """Identifies the frame across tools, which report one file relative to different folders."""
        return self.function, self.file.rpartition("/")[2], self.line


def frame(function: str, file: str, line: int) -> Frame:
    """The Frame of a function, which may be qualified by its class, in a file, which may have an absolute path.

    Tools shorten paths differently: the last three parts are kept, below site-packages where the path has it.
    """
    inside = file[-LONGEST:].replace("\\", "/").rpartition("site-packages/")[2]
    name = function[-LONGEST:]
    return Frame(name.rpartition(".")[2] or name, "/".join(inside.split("/")[-3:]), line)


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread: its frames, innermost first, its number, and whether it held Python's GIL (None: unknown)."""

    frames: tuple[Frame, ...]
    name: str = ""
    number: str = ""
    owns_gil: bool | None = None
    current: bool = False


@dataclass(frozen=True, kw_only=True)
class Dump:
    """The stacks of one process. `pid` is 0 and `command` "" where unknown; `cut`: the text is truncated."""

    threads: tuple[Thread, ...]
    pid: int = 0
    command: str = ""
    error: str = ""
    cut: bool = False
    main: Thread = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "main", training_thread(self.threads, self.cut))

    @property
    def gil_holder(self) -> Thread | None:
        """The helper thread that holds the GIL while the training thread waits for it; None where there is none."""
        others = [t for t in self.threads if t.owns_gil and t.frames and t.frames != self.main.frames]
        helper = [t for t in others if t.name != self.main.name and _outermost(t) in THREAD_STARTS]
        return helper[0] if helper else None


def training_thread(threads: tuple[Thread, ...], cut: bool) -> Thread:
    """The main thread, with autograd's frames on top where it waits for its backward pass.

    With CUDA the backward pass, and so the collectives in it, runs in a thread of autograd that Python did not start;
    it holds only the frames of what C++ called: a function's backward, or a hook of a parameter. Of several such
    threads the one counts that does not itself wait for the engine (a backward pass within a backward pass).
    In a truncated dump (`cut`) an unmarked thread may be any: then the result has no frames.
    """
    if not threads:
        return Thread(frames=())
    python = [t for t in threads if t.frames and _outermost(t) not in THREAD_STARTS]
    named = [t for t in python if t.name == "MainThread"]
    rooted = [t for t in python if _outermost(t) in ("<module>", "_run_module_as_main", "_start", "main")]
    # faulthandler cuts a deep stack after a hundred frames, so that its root is missing.
    sure = named or rooted or [t for t in python if _calls_engine(t)] or [t for t in python if t.current]
    main = next(iter(sure or ([] if cut else python[-1:] or list(threads[-1:]))), Thread(frames=()))
    if any(RAY.search(f.file) for f in main.frames) and not _own_frames(main):
        # An actor's main thread serves Ray: Train's workers, and actors with max_concurrency, train in another one.
        main = max((t for t in threads if _own_frames(t)), key=_own_frames, default=main)
    if _calls_engine(main):
        inside = [t for t in python if t is not main]
        inside = [t for t in inside if any(BACKWARD.search(f"{f.function} {f.file}") for f in t.frames)] or inside
        inside = sorted(inside, key=_calls_engine)
        if inside:
            return Thread(frames=inside[0].frames + main.frames, name=main.name, owns_gil=inside[0].owns_gil)
    return main


def _own_frames(thread: Thread) -> int:
    """The number of frames of the user's function that a thread of a Ray actor runs, the libraries that it calls
    included; 0 for a thread of Ray, of Python or of a helper."""
    first = next((n for n, f in enumerate(reversed(thread.frames)) if not LIBRARY.search(f.file)), None)
    return 0 if first is None else len(thread.frames) - first


def _calls_engine(thread: Thread) -> bool:
    """Whether the thread waits for autograd's engine."""
    if not thread.frames:
        return False
    at = thread.frames[0]
    return at.function in ENGINE_CALLERS or (at.function in AUTOGRAD and "autograd" in at.file)


def _outermost(thread: Thread) -> str:
    return thread.frames[-1].function if thread.frames else ""
