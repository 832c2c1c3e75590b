"""Frame, Thread, Dump: where the threads of one process stood, whichever tool said so."""

from dataclasses import dataclass, field

# Outermost functions of a thread that Python started: never the one that trains.
THREAD_STARTS = {"_bootstrap", "_bootstrap_inner"}


# Innermost function of the thread that waits for autograd's own (torch/autograd/graph.py; older: autograd/__init__.py).
AUTOGRAD = {"_engine_run_backward", "run_backward", "backward"}


@dataclass(frozen=True, order=True)
class Frame:
    """A line of a stack: the function's own name (its class left out), the end of the file's path, the line."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes two frames equal: tools name the same file from different folders."""
        return self.function, self.file.rpartition("/")[2], self.line


def frame(function: str, file: str, line: int) -> Frame:
    """The Frame of a function that may be qualified by its class, in a file that may be named from the root.

    Tools shorten paths differently: what is kept are the last three parts, below site-packages where that is named.
    """
    inside = file.replace("\\", "/").rpartition("site-packages/")[2]
    return Frame(function.rpartition(".")[2] or function, "/".join(inside.split("/")[-3:]), line)


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread: its frames, innermost first, and whether it held Python's lock (None: unknown)."""

    frames: tuple[Frame, ...]
    name: str = ""
    owns_gil: bool | None = None
    current: bool = False


@dataclass(frozen=True, kw_only=True)
class Dump:
    """The stacks of one process: `pid` 0, `command` "" where the tool did not say; `cut` where its text breaks off."""

    threads: tuple[Thread, ...]
    pid: int = 0
    command: str = ""
    error: str = ""
    cut: bool = False
    main: Thread = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "main", trained_in(self.threads, self.cut))

    @property
    def held_by(self) -> Thread | None:
        """The thread that held the global lock while the one that trains could not have it; None where nobody did."""
        others = [t for t in self.threads if t.owns_gil and t.frames and t.frames != self.main.frames]
        helper = [t for t in others if t.name != self.main.name and _outermost(t) in THREAD_STARTS]
        return helper[0] if helper else None


def trained_in(threads: tuple[Thread, ...], cut: bool) -> Thread:
    """The thread that trains: the main one, with autograd's frames on top where it waits for its backward pass.

    With CUDA the backward pass, and so the collectives in it, runs in a thread of autograd that Python did not start.
    Of a dump that is `cut`, a thread that nothing marks as the main one may be any: then there are no frames.
    """
    if not threads:
        return Thread(frames=())
    python = [t for t in threads if t.frames and _outermost(t) not in THREAD_STARTS]
    named = [t for t in python if t.name == "MainThread"]
    rooted = [t for t in python if _outermost(t) in ("<module>", "_run_module_as_main", "_start", "main")]
    sure = named or rooted or [t for t in python if t.current]
    main = next(iter(sure or ([] if cut else python[-1:] or list(threads[-1:]))), Thread(frames=()))
    if main.frames and main.frames[0].function in AUTOGRAD and "autograd" in main.frames[0].file:
        backward = [t for t in python if t is not main and "autograd" in t.frames[-1].file]
        if backward:
            return Thread(frames=backward[0].frames + main.frames, name=main.name, owns_gil=backward[0].owns_gil)
    return main


def _outermost(thread: Thread) -> str:
    return thread.frames[-1].function if thread.frames else ""
