"""Facts: what a log says beside its iterations: memory, timers, arguments, devices, bandwidth, and how it ended."""

import re

import numpy as np

from trilane.logs import arguments, bandwidth, deepspeed, devices, endings, megatron, trainers
from trilane.logs.draft import Draft

LAUNCH = re.compile(
    rb"using world size:|-{6,} arguments -|[Ii]nitializing torch distributed|\*{5} Running training|DeepSpeed info: "
)
LAUNCH_WORDS = (b"world size", b"arguments -", b"torch dist", b"Running", b"DeepSpeed", b".py")
HF_COUNT = rb">>  "


class Facts:
    """Takes lines and tells the run they belong to. It remembers what a fact needs of the lines before."""

    def __init__(self) -> None:
        self.inside = False  # a dump of arguments
        self._bench, self._devices = bandwidth.Bench(), devices.Devices()

    def is_launch(self, line: bytes) -> bool:
        """Whether the line is said when a training begins, and only then."""
        if not any(word in line for word in LAUNCH_WORDS):
            return False
        trains = line.startswith(b"+") and b".py" in line and bool(arguments.traced(line))
        return trains or bool(LAUNCH.search(line))

    def numbers(self, line: bytes, rank: float, run: Draft) -> None:
        """Memory, timers and rates."""
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
        elif rate := deepspeed.effective(line):
            if run.iterations.rows:
                run.iterations.change_last({"flops_per_s_per_gpu": rate})
        elif told := deepspeed.profile(line):
            run.summary[f"profiler: {told[0]}"] = told[1]
        elif row := self._bench.row(line):
            run.dialects["nccl-tests" if "message_bytes" in row else "all_reduce_bench"] += 0
            run.bandwidth.add(row)
            run.last_line = line
        elif device := self._devices.device(line):
            run.devices[device.index] = device

    def arguments(self, line: bytes, run: Draft) -> None:
        """Launch arguments."""
        if b"arguments" in line and (arguments.BEGIN.search(line) or arguments.END.search(line)):
            self.inside = not arguments.END.search(line)
        elif found := arguments.dumped(line, self.inside):
            run.arguments[found[0]] = found[1]
        elif HF_COUNT in line and (count := trainers.hf_count(line)):
            run.arguments[count[0]] = count[1]
        else:
            given = arguments.traced(line)
            # what the program says of itself comes before what the script gave it
            run.arguments |= {k: v for k, v in given.items() if k not in run.arguments} | arguments.world(line)

    def end(self, line: bytes, run: Draft) -> None:
        """Lines about the end."""
        if end := endings.ending(line, run.rows):
            run.add_ending(end)
        elif b"andwidth" in line and bandwidth.ends(line):
            run.add_ending(endings.planned(line, run.rows))
        elif run.root_rank is None and b"local_rank" in line and (root := endings.ROOT.search(line)):
            run.root_rank = int(root[1])
