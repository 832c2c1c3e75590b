"""Stack dump of one process, independent of the tool that wrote it: Frame, Thread, Dump."""

from dataclasses import dataclass, field

# Outermost functions of a thread that Python started: never the training thread.
THREAD_STARTS = {"_bootstrap", "_bootstrap_inner"}

# Innermost function of a thread that waits for autograd's own (torch/autograd/graph.py; older: autograd/__init__.py).
AUTOGRAD = {"_engine_run_backward", "run_backward", "backward"}


LONGEST = 400  # characters of a name that are kept


@dataclass(frozen=True, order=True)
class Frame:
    """A stack frame: the function without its class, the end of the file's path, the line."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def key(self) -> tuple[str, str, int]:
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
    """One thread: its frames, innermost first, and whether it held Python's GIL (None: unknown)."""

    frames: tuple[Frame, ...]
    name: str = ""
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

    With CUDA the backward pass, and so the collectives in it, runs in a thread of autograd that Python did not start.
    In a truncated dump (`cut`) an unmarked thread may be any: then the result has no frames.
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
