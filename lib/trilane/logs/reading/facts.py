"""Facts: all that a log holds besides iterations: memory, timers, arguments, devices and the end."""

import re
from dataclasses import replace

from trilane.logs import arguments, endings
from trilane.logs.dialects import Span, row_of
from trilane.logs.endings import Level
from trilane.logs.reading.runs import Device, PartialRun
from trilane.logs.table import NAN
from trilane.logs.watchdog import WORDS
from trilane.workspace.place import Known, Place
from trilane.workspace.status import Status

LAUNCH = re.compile(
    rb"using world size:|-{6} arguments -|[Ii]nitializing torch distributed|\*{5} Running training|DeepSpeed info: "
    rb"|- INFO - Starting job: |Setting OMP_NUM_THREADS environment variable|\[runner\.py:\d+:main\] cmd ="
    rb"|values were not passed to `accelerate launch`"
)
TIMERS = re.compile(rb"\btime \(ms\) \||\"timers\": \{")
# `name: 1.5 |` of a line, (min, max) of the table over ranks, and of a line of steps.jsonl, in
# seconds
TIMER = re.compile(rb"(?:^|\|)\s*+([^:|\s][^:|]{0,99}?)\s*:\s*(\d{1,30}(?:\.\d{0,30})?)\s*(?=\||$)")
OF_RANKS = re.compile(
    rb"(?:^|\s)([A-Za-z][\w/-]*) ?\.{2,}:\s+\(?(\d+(?:\.\d*)?)(?:,\s+(\d+(?:\.\d*)?)\))?\s*$"
)
OF_STEP = re.compile(
    rb"\"([\w/ -]{1,99})\": \[(NUMBER), (NUMBER)\]".replace(
        b"NUMBER", rb"\d{1,30}(?:\.\d{0,30})?(?:e[+-]?\d{1,3})?"
    )
)
# what starts the ranks of a node, of which srun sees one task: torchrun (accelerate, too),
# DeepSpeed's launch.py
LAUNCHERS = re.compile(
    rb"\[default\d+\]:|torchrun\b|torch[./]distributed[./](?:elastic|launch|run)|ChildFailedError|\(local_rank: \d"
    rb"|Setting OMP_NUM_THREADS|\blaunch\.py:\d"
)
# after a line of such a form says nothing, one with other digits may
DECIDES = re.compile(rb"oom|Xid|rrno|exit|status|return code|signal|ECC|error \d|enqueued|nranks")
GPU = re.compile(
    rb"^\s*(?:\S+: ?)?(?:"
    rb"\|\s+(\d{1,6})\s+(\S(?:.{0,80}?\S)?)\s+(?:On|Off|N/A)\s+\|\s+[\dA-Fa-f]+:[\dA-Fa-f]+:[\dA-Fa-f.]+"
    rb"|GPU (\d{1,6}): (\S[^()]{0,80}?) \(UUID: )"  # nvidia-smi -L
)
# what trilane's own runs print of themselves beside iterations and endings: engine/loop.py,
# launch/watchdog.py
OWN = re.compile(
    rb"(?:SLOW|NOT FINITE) since iteration \d.*|as fast as usual again, since .*|(?:NEXT )?CHECKPOINT (?:WILL )?NOT .*"
)
INSIDE = re.compile(endings.NUMBERS + rb"(?:\s|$)")  # a line of a traceback after its first


class Facts:
    """Parses lines into facts of their run, and holds the state that facts of several lines need."""

    def __init__(self) -> None:
        self.inside = 0  # lines that an open dump of arguments may still have
        self.traceback = 0  # lines that an open traceback may still have
        self._trace = b""  # the first line of a traceback without its exception
        self._ignored = False  # the exception of an open traceback is one that no caller sees
        # of torchrun's table of failures: the node, and when its first rank failed (that of others
        # sorts after it)
        self._host, self._failed = "", "~"
        self._entry: int | None = None  # the rank of the table's last entry
        # the table's entries are those that torchrun ended after the first, or failed later
        self._others = False
        self._gpu: tuple[int, str] | None = (
            None  # that nvidia-smi's table names, whose memory is on the next line
        )

    def is_launch(self, line: bytes) -> bool:
        """Whether the line is printed only when a training begins."""
        trains = line.startswith(b"+") and b".py" in line and bool(arguments.traced(line))
        return trains or bool(LAUNCH.search(line))

    def numbers(self, line: bytes, run: PartialRun) -> bool:
        """Read timers, rates and devices; returns whether the line has the form of any, digits
        aside.
        """
        if spans := timers(line):
            run.add_timers(row_of(spans, line))
        elif b"Effective Tera" in line:
            rate = re.search(rb"Effective Tera Flops per GPU: (\d+(?:\.\d*)?)", line)
            if rate and run.iterations.rows:
                run.iterations.change_last({"flops_per_s_per_gpu": float(rate[1]) * 1e12})
        elif found := GPU.match(line):
            index, name = (
                int(found[1] or found[3]),
                (found[2] or found[4]).decode("utf-8", "replace"),
            )
            self._gpu = (index, name) if found[1] else None
            if found[3]:
                run.devices[index] = Device(index=index, name=name, total_bytes=NAN)
        elif self._gpu and (use := re.search(rb"\dMiB\s*/\s*(\d{1,15})MiB", line)):
            (index, name), self._gpu = self._gpu, None
            run.devices[index] = Device(index=index, name=name, total_bytes=float(use[1]) * 2**20)
        elif own := OWN.search(line):
            run.own += [endings.text(own[0])] * (len(run.own) < 50)
        else:
            return self._gpu is not None or b"MiB" in line
        return True

    def arguments(self, line: bytes, run: PartialRun) -> bool:
        """Read launch arguments; returns whether the line holds any."""
        if b"arguments" in line and (arguments.BEGIN.search(line) or arguments.END.search(line)):
            self.inside = (
                0 if arguments.END.search(line) else 2000
            )  # lines without an argument close it
            return True
        if found := arguments.dumped(line, self.inside > 0):
            self.inside = 2000 if self.inside else 0
            run.arguments[found[0]] = found[1]
            return True
        self.inside -= self.inside > 0
        given, world = arguments.traced(line), arguments.sizes(line)
        # what the program prints takes precedence over what the script passed
        run.arguments |= {k: v for k, v in given.items() if k not in run.arguments} | world
        return bool(given or world)

    def end(self, line: bytes, run: PartialRun) -> bool:
        """Read endings and tracebacks; returns whether the line may be part of one, digits aside."""
        if any(word in line for word in WORDS):
            run.watchdogs.read(line)
        run.places.has_launchers |= bool(LAUNCHERS.search(line))
        was_open = self.traceback > 0
        raised = self._raised(line, run)
        ignored = self._ignored and (was_open or self.traceback > 0)
        self._ignored = ignored and self.traceback > 0
        if b"Exception ignored in" in line:  # raised by a destructor
            self._ignored, self.traceback = True, max(self.traceback, 1)
        if end := endings.ending(line, run.rows) or raised:
            is_later = self._others and re.search(rb"(?:exitcode|traceback)\s+: ", line)
            if not is_later and not (ignored and end.level in (Level.ERROR, Level.CONSEQUENCE)):
                if self._entry is not None and re.match(rb"\s*exitcode\s", line):
                    end = replace(end, place=Place(rank=self._entry, rank_known=Known.MAP))
                run.places.see(end.place, line)
                run.add_ending(replace(end, in_traceback=was_open))
        elif re.search(
            rb"local_rank|host  |time  |nranks|Root Cause|Failures:\s*$|global_rank_m", line
        ):
            self._place(line, run)
        elif not was_open and not self.traceback:
            return bool(DECIDES.search(line))  # `0 oom_kill events` is none, 1 is one
        return True

    def close(self, run: PartialRun) -> None:
        """Read the end of the file: a traceback whose exception is missing has ended the run, if
        nothing else has.
        """
        if self.traceback and self._trace and not self._ignored:
            run.add_ending(endings.reported(Level.LAUNCHER, Status.CRASHED, self._trace, run.rows))

    def _place(self, line: bytes, run: PartialRun) -> None:
        """Read on which host a rank ran: from torchrun's table of failures, or from NCCL."""
        if (is_root := b"Root Cause" in line) or b"Failures:" in line:
            self._others = not is_root
        if is_root:
            self._failed, self.traceback = (
                "9",
                8,
            )  # an entry without a time comes after those with one
        elif self._failed != "~" and (
            time := re.match(rb"\s*time\s{1,20}: (\d{4}-\d\d-\d\d_[\d:]{8})\s*$", line)
        ):
            self._failed = endings.text(time[1])
        elif host := re.match(rb"\s*host\s{1,20}: (\S{1,99})\s*$", line):
            self._host = endings.text(host[1])
        elif root := re.search(rb"rank\s+: (\d{1,9}) \(local_rank: (\d{1,4})\)", line):
            run.places.listed(int(root[1]), int(root[2]), self._host, self._failed)
            self._entry, self._host, self._failed = int(root[1]), "", "~"
        elif b"nranks" in line or b"global_rank_m" in line:
            run.places.mapped(line)

    def _raised(self, line: bytes, run: PartialRun) -> endings.Ending | None:
        """The exception that ends a traceback: its first line that is not indented."""
        if re.search(rb"Traceback \(most recent call last\):\s*$", line):
            self.traceback, self._trace = 500, line
        elif self.traceback and INSIDE.match(line):
            self.traceback -= 1
        elif self.traceback:
            self.traceback, self._trace = 0, b""
            return endings.raised(line, run.rows)
        return None


def timers(line: bytes) -> list[Span]:
    """The framework's timers in a line, in seconds, by name; of (min, max) over ranks the minimum
    is `<name> min`.
    """
    found, divisor = list[re.Match[bytes]](), 1e3
    if head := TIMERS.search(line):
        is_step = b"{" in head[0]
        found = [*(OF_STEP if is_step else TIMER).finditer(line, head.end() - (not is_step))]
        divisor = 1.0 if is_step else 1e3
    elif b"...:" in line and (match := OF_RANKS.search(line)):
        found = [match]
    spans = dict[str, Span]()
    for match in found:
        name = match[1].decode("utf-8", "replace")
        names = [f"{name} min", name] if match.re.groups > 2 and match[3] else [name]
        for place, key in enumerate(names, 2):
            if key != "iteration":  # joined lines name a timer twice: the first counts
                spans.setdefault(key, Span(key, *match.span(place), 1.0, divisor))
    return list(spans.values())
