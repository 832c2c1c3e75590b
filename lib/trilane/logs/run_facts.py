"""Facts: what a log says beside its iterations: memory, timers, arguments, devices, bandwidth, and how it ended."""

import re

import numpy as np

from trilane.logs import arguments, bandwidth, deepspeed, devices, endings, megatron, trainers
from trilane.logs.arguments import Value
from trilane.logs.partial_run import PartialRun

LAUNCH = re.compile(
    rb"using world size:|-{6,} arguments -|[Ii]nitializing torch distributed|\*{5} Running training|DeepSpeed info: "
    rb"|- INFO - Starting job: "
)

LAUNCH_WORDS = re.compile(rb"world size|arguments -|torch dist|Running|DeepSpeed|Starting job|\.py")
HF_COUNT = rb">>  "
MOST_OTHERS = 2000  # lines in a row that are no argument: the dump is over, though its end was not seen
MOST_FRAMES = 500  # lines of a traceback: a deeper one is none
MOST_HEARD = 20_000  # lines with arguments that are remembered, since every rank may print them


class Facts:
    """Takes lines and tells the run they belong to. It remembers what a fact needs of the lines before."""

    def __init__(self) -> None:
        self.inside, self._other = False, 0  # a dump of arguments; lines in it since the last argument
        self.frames = 0  # lines that an open traceback may still have
        self.heard: set[bytes] = set()  # lines of dumps that would change nothing if they came again
        self._bench, self._devices = bandwidth.Bench(), devices.Devices()

    def is_launch(self, line: bytes) -> bool:
        """Whether the line is said when a training begins, and only then."""
        if not LAUNCH_WORDS.search(line):
            return False
        trains = line.startswith(b"+") and b".py" in line and bool(arguments.traced(line))
        return trains or bool(LAUNCH.search(line))

    def numbers(self, line: bytes, rank: float, run: PartialRun) -> bool:
        """Memory, timers and rates. Whether the line has the form of any of them, digits aside."""
        who = 0.0 if rank != rank else rank
        if b"memory (MB)" in line:
            for report in megatron.memories(line):
                run.add_memory(report)
        elif b"MA " in line or b"MemAllocated" in line:
            for report in deepspeed.memories(line):
                run.add_memory({"rank": who, **report})
        elif spans := megatron.timers(line):
            values = np.array([[span.value(line)] for span in spans])
            run.add_timers([span.column for span in spans], np.array([run.now]), values)
        elif b"Effective Tera" in line:
            if (rate := deepspeed.effective(line)) and run.iterations.rows:
                run.iterations.change_last({"flops_per_s_per_gpu": rate})
        elif told := deepspeed.profile(line):
            run.summary[f"profiler: {told[0]}"] = told[1]
        elif row := self._bench.row(line):
            run.dialects["nccl-tests" if "message_bytes" in row else "all_reduce_bench"] += 0
            run.bandwidth.add(row)
            run.last_line = line
        elif device := self._devices.device(line):
            run.devices[device.index] = device
        else:
            return self._bench.took or self._devices.waits or b"MiB" in line
        return True

    def arguments(self, line: bytes, run: PartialRun) -> bool:
        """Launch arguments; whether the line tells any."""
        if b"arguments" in line and (arguments.BEGIN.search(line) or arguments.END.search(line)):
            self.inside, self._other = not arguments.END.search(line), 0
            return True
        if found := arguments.dumped(line, self.inside):
            self._other = 0
            self._hear(line, found, run)
        elif HF_COUNT in line and (count := trainers.hf_count(line)):
            run.arguments[count[0]] = count[1]
        else:
            given = arguments.traced(line)
            # what the program says of itself comes before what the script gave it
            run.arguments |= {k: v for k, v in given.items() if k not in run.arguments} | (
                world := arguments.world(line)
            )
            self._other += 1
            if self._other > MOST_OTHERS:
                self.inside = False
            return bool(given or world)
        return True

    def _hear(self, line: bytes, found: tuple[str, Value], run: PartialRun) -> None:
        name, value = found
        if run.arguments.get(name, value) != value:
            self.heard.clear()  # the last word counts, also where it was said before
        run.arguments[name] = value
        if len(self.heard) < MOST_HEARD and len(line) < 1000:
            self.heard.add(line)

    def end(self, line: bytes, run: PartialRun) -> bool:
        """Lines about the end, and those of a traceback before it; whether the line may be one, digits aside."""
        raised = self._raised(line, run)
        if end := endings.ending(line, run.rows) or raised:
            run.add_ending(end)
        elif b"andwidth" in line and bandwidth.ends(line):
            run.add_ending(endings.planned(line, run.rows))
        elif b"local_rank" in line:
            if run.root_rank is None and (root := endings.ROOT.search(line)):
                run.root_rank = int(root[1])
        elif not self.frames:
            return b"oom" in line  # `0 oom_kill events` is none, 1 is one
        return True

    def _raised(self, line: bytes, run: PartialRun) -> endings.Ending | None:
        """The exception that ends a traceback: the first line behind it that is not indented."""
        if endings.TRACEBACK.search(line):
            self.frames = MOST_FRAMES
        elif self.frames and endings.FRAME.match(line):
            self.frames -= 1
        elif self.frames:
            self.frames = 0
            return endings.raised(line, run.rows)
        return None
