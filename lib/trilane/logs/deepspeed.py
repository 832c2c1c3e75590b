"""Lines of DeepSpeed: optimizer steps, the pipeline engine, the throughput timer, memory, the flops profiler."""

import re
from collections.abc import Iterator

GIB = 2**30  # what DeepSpeed prints as GB is GiB
NUMBER = rb"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
STEP = re.compile(rb"\[Rank \d+\] step=(\d+), skipped=(\d+), lr=\[?" + NUMBER + rb"?")
PIPELINE = re.compile(rb"steps: (\d+) loss: %s iter time \(s\): %s samples/sec: %s" % (NUMBER, NUMBER, NUMBER))
THROUGHPUT = re.compile(rb"(?:global_step=(\d+)|\d+/(\d+)), (?:RunningAvg)?SamplesPerSec=" + NUMBER)
CURRENT = re.compile(rb"CurrSamplesPerSec=" + NUMBER)
TIMER_MEMORY = re.compile(rb"MemAllocated=(\d+\.?\d*)GB, MaxMemAllocated=(\d+\.?\d*)GB")
MEMORY = re.compile(rb"MA (\d+\.?\d*) GB\s+Max_MA (\d+\.?\d*) GB\s+CA (\d+\.?\d*) GB\s+Max_CA (\d+\.?\d*) GB")
PROFILE = re.compile(
    rb"^\s*(?:\S+: )?((?:fwd|bwd|iter|step|params|world size|data parallel|batch size|model parallel)[^:]*):"
    rb"\s+(\d+\.?\d*) ?([KMGTP]?)\s?(FLOPS|FLOPs|MACs|samples/second|ms|us|s)?\s*$"
)
SCALES = {b"": 1.0, b"K": 1e3, b"M": 1e6, b"G": 1e9, b"T": 1e12, b"P": 1e15}
SECONDS = {b"ms": 1e-3, b"us": 1e-6}
EFFECTIVE = re.compile(rb"Effective Tera Flops per GPU: (\d+\.?\d*)")


def steps(line: bytes) -> Iterator[dict[str, float]]:
    """Rows of the optimizer steps in a line, from any of three reporters. Step 0, printed at start-up, is left out."""
    for found in STEP.finditer(line):
        if int(found[1]) > 0:
            row = {"iteration": float(found[1]), "skipped_total": float(found[2])}
            yield row | ({"learning_rate": float(found[3])} if found[3] else {})
    for found in PIPELINE.finditer(line):
        names = ("iteration", "lm_loss", "sec_per_it", "samples_per_second")
        yield {name: float(text) for name, text in zip(names, found.groups(), strict=True)}
    for found in THROUGHPUT.finditer(line):
        current = CURRENT.search(line, found.end())
        rate = float(current[1] if current else found[3])
        yield {"iteration": float(found[1] or found[2]), "samples_per_second": rate}


def memories(line: bytes) -> Iterator[dict[str, float]]:
    """Current and peak bytes, as see_memory_usage and the throughput timer print them on rank 0."""
    for found in MEMORY.finditer(line):
        names = ("allocated", "max_allocated", "reserved", "max_reserved")
        yield {name: float(text) * GIB for name, text in zip(names, found.groups(), strict=True)}
    for found in TIMER_MEMORY.finditer(line):
        yield {"allocated": float(found[1]) * GIB, "max_allocated": float(found[2]) * GIB}


def profile(line: bytes) -> tuple[str, float] | None:
    """Name and value of a flops profiler line, in FLOP/s, seconds or a count; None for other lines."""
    found = PROFILE.match(line)
    if not found:
        return None
    value = float(found[2]) * SCALES[found[3]] * SECONDS.get(found[4] or b"", 1.0)
    return " ".join(found[1].decode("utf-8", "replace").split()), value


def effective_flops(line: bytes) -> float | None:
    """FLOP/s per GPU, which Megatron with ZeRO-3 prints on the line after an iteration; None for other lines."""
    found = EFFECTIVE.search(line)
    return float(found[1]) * 1e12 if found else None
