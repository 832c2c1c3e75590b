"""Facts: what a log holds besides iterations: timers, arguments, the end."""

import re
from dataclasses import replace

from trilane.logs import arguments, endings
from trilane.logs.dialects import Span
from trilane.logs.endings import Ending, Level
from trilane.logs.places import Place
from trilane.logs.reading.runs import PartialRun
from trilane.logs.watchdog import WORDS

# printed only when a training begins
LAUNCH = re.compile(
    rb"using world size:|-{6} arguments -|[Ii]nitializing torch distributed"
    rb"|\*{5} Running training|DeepSpeed info: |- INFO - Starting job: "
    rb"|Setting OMP_NUM_THREADS environment variable|\[runner\.py:\d+:main\] cmd ="
    rb"|values were not passed to `accelerate launch`"
)
TIMERS = re.compile(rb"\btime \(ms\) \|")
# `name: 1.5 |` of a line, and (min, max) of the table over ranks
TIMER = re.compile(rb"(?:^|\|)\s*+([^:|\s][^:|]{0,99}?)\s*:\s*(\d{1,30}(?:\.\d{0,30})?)\s*(?=\||$)")
OF_RANKS = re.compile(
    rb"(?:^|\s)([A-Za-z][\w/-]*) ?\.{2,}:\s+(?:\(\d+(?:\.\d*)?,\s+)?(\d+(?:\.\d*)?)\)?\s*$"
)
# what starts the ranks of a node, of which srun sees one task: torchrun (accelerate, too),
# DeepSpeed's launch.py
LAUNCHERS = re.compile(
    rb"\[default\d+\]:|torchrun\b|torch[./]distributed[./](?:elastic|launch|run)|ChildFailedError"
    rb"|\(local_rank: \d|Setting OMP_NUM_THREADS|\blaunch\.py:\d"
)
# after a line of such a form says nothing, one with other digits may
DECIDES = re.compile(rb"oom|Xid|rrno|exit|status|return code|signal|ECC|error \d|enqueued|nranks")
# what trilane's own runs print of themselves beside iterations and endings: the engine's loop, the
# watchdog
OWN = re.compile(
    rb"(?:SLOW|NOT FINITE) since iteration \d.*|as fast as usual again, since .*"
    rb"|(?:NEXT )?CHECKPOINT (?:WILL )?NOT .*"
)
# NVIDIA-NeMo/Megatron-Bridge: its rate stands on a line before that of the iteration
BRIDGE = re.compile(rb"GPU utilization: (\d{1,9}(?:\.\d*)?)MODEL_TFLOP/s/GPU")
MAX_OWN = 50  # of these lines
INSIDE = re.compile(endings.NUMBERS + rb"(?:\s|$)")  # a line of a traceback after its first
PLACE = re.compile(rb"local_rank|host  |nranks|Root Cause|Failures:\s*$|global_rank_m")
HOST = re.compile(rb"\s*host\s{1,20}: (\S{1,99})\s*$")
ENTRY = re.compile(rb"rank\s+: (\d{1,9}) \(local_rank: \d{1,4}\)")
MAX_TRACEBACK = 500  # lines


class Facts:
    """Parses lines into facts of their run, with the state of facts of several lines."""

    def __init__(self) -> None:
        self.traceback = 0  # lines that an open traceback may still have
        self._ignored = False  # the exception of an open traceback is one that no caller sees
        # of torchrun's table of failures: the node and the rank of the last entry, and whether it
        # is one that torchrun ended after the first, or that failed later
        self._host = ""
        self._entry: int | None = None
        self._others = False

    def numbers(self, line: bytes, run: PartialRun) -> bool:
        """Read a rate, or what trilane prints of itself; whether the line holds any."""
        if b"Effective Tera" in line:
            rate = re.search(rb"Effective Tera Flops per GPU: (\d+(?:\.\d*)?)", line)
            if rate and run.rows:
                run.iterations.change_last({"flops_per_s_per_gpu": float(rate[1]) * 1e12})
        elif rate := BRIDGE.search(line):
            run.ahead = {"flops_per_s_per_gpu": float(rate[1]) * 1e12}
            run.program = "megatron-bridge"
        elif own := OWN.search(line):
            if len(run.own) < MAX_OWN:
                run.own.append(endings.text(own[0]))
        else:
            return False
        return True

    def arguments(self, line: bytes, run: PartialRun) -> bool:
        """Read launch arguments; returns whether the line holds any."""
        if pair := arguments.dumped(line):
            run.arguments[pair[0]] = pair[1]
            return True
        given = arguments.traced(line)
        sizes = arguments.sizes(line)
        if given or sizes:
            # what the program prints takes precedence over what the script passed
            run.arguments = given | run.arguments | sizes
        return bool(given or sizes)

    def end(self, line: bytes, run: PartialRun) -> bool:
        """Read endings and tracebacks; whether the line may be part of one, digits aside."""
        if any(word in line for word in WORDS):
            run.watchdogs.read(line)
        run.places.has_launchers |= bool(LAUNCHERS.search(line))
        was_open = self.traceback > 0
        raised = self._raised(line, run)
        is_ignored = self._ignored
        self._ignored &= self.traceback > 0
        if b"Exception ignored in" in line:  # raised by a destructor
            self._ignored = True
            self.traceback = max(self.traceback, 1)
        if end := endings.ending(line, run.rows) or raised:
            is_later = self._others and re.search(rb"(?:exitcode|traceback)\s+: ", line)
            is_unseen = is_ignored and end.level in (Level.ERROR, Level.CONSEQUENCE)
            if not is_later and not is_unseen:
                if self._entry is not None and re.match(rb"\s*exitcode\s", line):
                    end = replace(end, place=Place(rank=self._entry))
                run.places.see(end.place, line)
                run.add_ending(end)
        elif PLACE.search(line):
            self._place(line, run)
        elif not was_open and not self.traceback:
            return bool(DECIDES.search(line))  # `0 oom_kill events` is none, 1 is one
        return True

    def _place(self, line: bytes, run: PartialRun) -> None:
        """Read on which host a rank ran: from torchrun's table of failures, or from NCCL."""
        if b"Root Cause" in line:
            self._others = False
        elif b"Failures:" in line:
            self._others = True
        elif host := HOST.match(line):
            self._host = endings.text(host[1])
        elif entry := ENTRY.search(line):
            self._entry = int(entry[1])
            run.places.see(Place(rank=self._entry, node=self._host), line)
            self._host = ""
        else:
            run.places.mapped(line)

    def _raised(self, line: bytes, run: PartialRun) -> Ending | None:
        """The exception that ends a traceback: its first line that is not indented."""
        if re.search(rb"Traceback \(most recent call last\):\s*$", line):
            self.traceback = MAX_TRACEBACK
        elif self.traceback and INSIDE.match(line):
            self.traceback -= 1
        elif self.traceback:
            self.traceback = 0
            return endings.raised(line, run.rows)
        return None


def timers(line: bytes) -> list[Span]:
    """The timers in a line, in seconds, by name; of (min, max) over ranks the maximum."""
    if head := TIMERS.search(line):
        every = TIMER.finditer(line, head.end() - 1)
    elif b"...:" in line:
        every = OF_RANKS.finditer(line)
    else:
        return []
    spans: dict[str, Span] = {}
    for match in every:
        name = match[1].decode("utf-8", "replace")
        if name != "iteration":
            spans.setdefault(name, Span(name, *match.span(2), 1.0, 1e3))
    return list(spans.values())
