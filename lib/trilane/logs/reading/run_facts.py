"""RunFacts: all that a log holds besides iterations: memory, timers, arguments, devices, bandwidth and the end."""

import re
from dataclasses import replace

import numpy as np

from trilane.logs import arguments, endings, hardware
from trilane.logs.dialects import megatron, trainers
from trilane.logs.reading.partial_run import PartialRun
from trilane.logs.watchdog import WORDS

LAUNCH = re.compile(
    rb"using world size:|-{6} arguments -|[Ii]nitializing torch distributed|\*{5} Running training|DeepSpeed info: "
    rb"|- INFO - Starting job: |Setting OMP_NUM_THREADS environment variable|\[runner\.py:\d+:main\] cmd ="
    rb"|values were not passed to `accelerate launch`"
)
LAUNCH_WORDS = re.compile(rb"world size|arguments -|torch dist|Running|DeepSpeed|Starting job|\.py|OMP_NUM|accelerate")
HF_COUNT = rb">>  "
MAX_OTHER_LINES = 2000  # without an argument, after which a dump counts as closed
MAX_TRACEBACK = 500  # lines
MAX_ENTRY = 8  # lines of an entry in torchrun's table of failures
OTHER = "~"  # instead of a time, of a failure that is not the first; sorts after any time
MAX_SEEN = 20_000  # lines with arguments that are remembered, since every rank may print them


class RunFacts:
    """Parses lines into facts of their run, and holds the state that facts of several lines need."""

    def __init__(self) -> None:
        self.inside, self._other = False, 0  # whether a dump is open; lines since its last argument
        self.traceback = 0  # lines that an open traceback may still have
        self._dumped = dict[bytes, tuple[str, arguments.Value]]()  # lines of dumps, which every rank and run may repeat
        self._trace = b""  # the first line of a traceback without its exception
        self._ignored = False  # the exception of an open traceback
        self._host, self._failed = (
            "",
            OTHER,
        )  # of torchrun's table of failures: the node, and when its first rank failed
        self._benchmark, self._devices = hardware.BenchmarkParser(), hardware.DeviceParser()

    def is_launch(self, line: bytes) -> bool:
        """Whether the line is printed only when a training begins."""
        if not LAUNCH_WORDS.search(line):
            return False
        trains = line.startswith(b"+") and b".py" in line and bool(arguments.traced(line))
        return trains or bool(LAUNCH.search(line))

    def numbers(self, line: bytes, rank: float, run: PartialRun) -> bool:
        """Read memory, timers and rates; returns whether the line has the form of any of them, digits aside."""
        reporter = 0.0 if rank != rank else rank
        if b"memory (MB)" in line:
            for report in megatron.memories(line):
                run.add_memory(report)
        elif b"MA " in line or b"MemAllocated" in line:
            for report in trainers.deepspeed_memories(line):
                run.add_memory({"rank": reporter, **report})
        elif b"validation" in line and (spans := megatron.validation_spans(line)):
            run.add_validation({span.column: span.value(line) for span in spans})
        elif spans := megatron.timers(line):
            values = np.array([[span.value(line)] for span in spans])
            run.add_timers([span.column for span in spans], np.array([run.iteration]), values)
        elif b"Effective Tera" in line:
            if (rate := trainers.effective_flops(line)) and run.iterations.rows:
                run.iterations.change_last({"flops_per_s_per_gpu": rate})
        elif profiled := trainers.flops_profile(line):
            run.summary[f"profiler: {profiled[0]}"] = profiled[1]
        elif row := self._benchmark.row(line):
            run.dialects["nccl-tests" if "message_bytes" in row else "all_reduce_bench"] += 0
            run.bandwidth.add(row)
            run.last_line = line
        elif device := self._devices.device(line):
            run.devices[device.index] = device
        else:
            return self._benchmark.matched or self._devices.pending is not None or b"MiB" in line
        return True

    def arguments(self, line: bytes, run: PartialRun) -> bool:
        """Read launch arguments; returns whether the line holds any."""
        if b"arguments" in line and (arguments.BEGIN.search(line) or arguments.END.search(line)):
            self.inside, self._other = not arguments.END.search(line), 0
            return True
        if found := arguments.dumped(line, self.inside):
            self._other, (name, value) = 0, found
            run.arguments[name] = value
            if len(self._dumped) < MAX_SEEN and len(line) < 1000 and b" .." in line:
                self._dumped[line] = found
        elif HF_COUNT in line and (count := trainers.hf_count(line)):
            run.arguments[count[0]] = count[1]
        else:
            given = arguments.traced(line)
            # what the program prints takes precedence over what the script passed
            world = arguments.world(line)
            run.arguments |= {k: v for k, v in given.items() if k not in run.arguments} | world
            self._other += 1
            if self._other > MAX_OTHER_LINES:
                self.inside = False
            return bool(given or world)
        return True

    def repeat(self, line: bytes, run: PartialRun) -> bool:
        """Read the argument of a line that was read before; False for any other line."""
        if found := self._dumped.get(line):
            self._other = 0
            run.arguments[found[0]] = found[1]
        return bool(found)

    def end(self, line: bytes, run: PartialRun) -> bool:
        """Read endings and tracebacks; returns whether the line may be part of one, digits aside."""
        if any(word in line for word in WORDS):
            run.watchdogs.read(line)
        run.has_launchers |= bool(endings.LAUNCHER_OF_NODE.search(line))
        was_open = self.traceback > 0
        raised = self._raised(line, run)
        ignored = self._ignored and (was_open or self.traceback > 0)  # raised by a destructor, which no caller sees
        self._ignored = ignored and self.traceback > 0
        if b"Exception ignored in" in line:
            self._ignored, self.traceback = True, max(self.traceback, 1)
        if end := endings.ending(line, run.rows) or raised:
            if not (ignored and end.level in (endings.ERROR, endings.CONSEQUENCE)):
                run.add_ending(replace(end, in_traceback=was_open))
        elif b"andwidth" in line and hardware.benchmark_finished(line):
            run.add_ending(endings.planned_end(line, run.rows))
        elif any(word in line for word in (b"local_rank", b"host  ", b"time  ", b"nranks", b"Root Cause")):
            self._place(line, run)
        elif not self.traceback:
            return bool(endings.DIGITS_DECIDE.search(line))  # `0 oom_kill events` is none, 1 is one
        return True

    def close(self, run: PartialRun) -> None:
        """Read the end of the file: a traceback whose exception is missing has ended the run, if nothing else has."""
        if self.traceback and self._trace and not self._ignored:
            run.add_ending(replace(endings.crashed(self._trace, run.rows), level=endings.LAUNCHER))

    def _place(self, line: bytes, run: PartialRun) -> None:
        """Read on which host and GPU a rank ran: from torchrun's table of failures, or from NCCL."""
        if b"Root Cause" in line:
            self._failed, self.traceback = "9", MAX_ENTRY  # an entry without a time comes after those with one
        elif self._failed != OTHER and (time := endings.FAILED_TIME.match(line)):
            self._failed = endings.text(time[1])
        elif host := endings.FAILED_HOST.match(line):
            self._host = endings.text(host[1])
        elif root := endings.ROOT.search(line):
            if run.root_rank is None or self._failed < run.root_time:  # each node prints a table
                run.root_rank, run.root_time = int(root[1]), self._failed
            if self._host:
                run.places[int(root[1])] = (self._host, str(int(root[2])))
            self._host, self._failed = "", OTHER
        elif named := endings.NCCL_RANK.search(line):
            size = int(named[4])
            if size > run.watchdogs.world:  # the largest communicator numbers the ranks of the run
                run.watchdogs.world, run.places = size, {}
            if size == run.watchdogs.world:
                run.places.setdefault(int(named[3]), (endings.text(named[1]), str(int(named[2]))))

    def _raised(self, line: bytes, run: PartialRun) -> endings.Ending | None:
        """The exception that ends a traceback: its first line that is not indented."""
        if endings.TRACEBACK.search(line):
            self.traceback, self._trace = MAX_TRACEBACK, line
        elif self.traceback and endings.FRAME.match(line):
            self.traceback -= 1
        elif self.traceback:
            self.traceback, self._trace = 0, b""
            return endings.raised(line, run.rows)
        return None
