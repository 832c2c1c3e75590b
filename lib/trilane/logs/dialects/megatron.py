"""Lines of Megatron-LM, Megatron-DeepSpeed, deepspeedai's fork and gpt-neox.

The functions return *spans*, the positions of numbers in a line, so that one parse serves all lines of the same form.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

# dialects of Megatron's family, which may stand in one run
FAMILY = {"megatron-lm", "megatron-2021", "megatron-deepspeed-2022", "deepspeedai", "gpt-neox"}
ITERATION = re.compile(rb"iteration\s+(\d{1,18})\s*/\s*(\d{1,18}|infinity)\s*\|")
MEMORY = re.compile(rb"(?:\[Rank (\d{1,9})\] )?\(?after (\d{1,18}) iterations\)? memory \(MB\) \|")
TIMERS = re.compile(rb"\btime \(ms\) \|")
TIMER = re.compile(rb"^\s*(?:\S+:\s+)?([A-Za-z][\w/-]*) ?\.{2,}:\s+\(?(\d+(?:\.\d*)?)(?:,\s+(\d+(?:\.\d*)?)\))?\s*$")
VALIDATION = re.compile(  # not of the test set; gpt-neox prints "results" and "lm_loss"
    rb"validation(?: [\w./-]+)? (?:loss|results) at iteration\s+(\d{1,18})(?! on test)[^|]{0,60}\|\s*"
    rb"(?:lm|LM)[ _-]loss(?: value)?:\s*([-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|(?i:nan|inf)))"
)
FIELD = re.compile(
    rb"\s*+([^:|\s][^:|]*?)(?<!\s)\s*+(:?)\s*+([-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|(?i:nan|inf)))(?:/[\d.]+)?\s*([KMGTP]?FLOPS)?\s*(?:\||$)"
)
# what launchers put before a line: a rank (the first four groups), or a process or host, which sources of copies have
PREFIX = re.compile(
    rb"^\s*(?:\[default\d{1,9}\]: ?(?=\[rank))?"  # torchrun's number on the node
    rb"(?:\[default(\d{1,9})\]:|\[?[Rr]ank ?(\d{1,9})\]?:|(\d{1,6}): |\[\d{1,6},(\d{1,9})\]<std\w{3}>:"
    rb"|\[(\d{1,9})\]:?|[A-Za-z][\w-]{0,80}?(\d{1,9})(?:\.[\w.-]{1,200})?: )"
)
RANKS = 4
LEAD = re.compile(  # what collectors of logs, and loggers, put before it
    rb"^(?:\[[\w./ -]{1,200}\] |[\w.-]{1,100}-\d+ \w{1,40} |[A-Z]{4,8}:[\w.]{1,80}:"
    rb"|\[?\d{4}-\d\d-\d\d[ T][\d:.,]{8,20}Z?\]?(?:\[\w{1,80}\]){0,4} ?(?:- \w{1,40} - )?)"
)
LONGEST_FIELD = 200  # bytes between two bars: matching time grows with the square of the digits
NEOX_RATE = re.compile(rb"samples/sec: (\d+(?:\.\d*)?) \|\s*$")
PREFIXES = {b"": 1.0, b"K": 1e3, b"M": 1e6, b"G": 1e9, b"T": 1e12, b"P": 1e15}

# Megatron's names -> (column, multiplier, divisor) to seconds, FLOP/s, bytes. Two factors, because x 1e-3 rounds where
# / 1e3 does not.
SAME = "consumed samples,consumed tokens,samples per second,learning rate,global batch size,lm loss,loss scale"
COLUMNS = {
    **{name: (name.replace(" ", "_"), 1.0, 1.0) for name in f"{SAME},grad norm,num zeros,params norm".split(",")},
    "elapsed time per iteration (ms)": ("sec_per_it", 1.0, 1e3),
    "elapsed time per iteration (s)": ("sec_per_it", 1.0, 1.0),
    "throughput per GPU (TFLOP/s/GPU)": ("flops_per_s_per_gpu", 1e12, 1.0),
    "compute per GPU (TFLOP/s/GPU)": ("flops_per_s_per_gpu", 1e12, 1.0),
    "tokens per GPU (tokens/s/GPU)": ("tokens_per_gpu_per_second", 1.0, 1.0),
    "TFLOPs": ("flops_per_s_per_gpu", 1e12, 1.0),
    "approx flops per GPU": ("flops_per_s_per_gpu", 1.0, 1.0),
    "tokens per gpu per second (tgs)": ("tokens_per_gpu_per_second", 1.0, 1.0),
    "actual seqlen": ("seq_length", 1.0, 1.0),
    "curriculum seqlen": ("seq_length", 1.0, 1.0),
    "lm-loss": ("lm_loss", 1.0, 1.0),
    "number of skipped iterations": ("skipped", 1.0, 1.0),
    "number of nan iterations": ("nan", 1.0, 1.0),
}


class Span(NamedTuple):
    """The position of a number in a line, its column, and the factors to the unit of the column."""

    column: str
    start: int
    stop: int
    multiplier: float = 1.0
    divisor: float = 1.0

    def value(self, line: bytes) -> float:
        """The number, in the unit of its column."""
        return float(line[self.start : self.stop].replace(b",", b"")) * self.multiplier / self.divisor


def iterations(line: bytes, whole: bool = True) -> Iterator[list[Span]]:
    """The numbers of each iteration in a line; there are several where the lines of two ranks were joined.

    Unless `whole`, the line is cut off, and its last number is not used. Of unknown fields only losses are kept.
    """
    found = list(ITERATION.finditer(line))
    end = 0
    for this, after in zip(found, [*found[1:], None], strict=False):
        spans = [Span("iteration", *this.span(1))]
        if this[2].isdigit():
            spans.append(Span("train_iters", *this.span(2)))
        if rate := NEOX_RATE.search(line, end, this.start()):
            spans.append(Span("samples_per_second", *rate.span(1)))
        end, stop = this.end(), after.start() if after else len(line)
        known = {span.column for span in spans}
        fields = [s for s in _fields(line, this.end(), stop, whole or after is not None) if s.column not in known]
        # some forks print the loss without a name before it
        plain = "loss" if all(s.column != "lm_loss" for s in fields) else ""
        spans += [s._replace(column="lm_loss") if s.column == plain else s for s in fields]
        if prefix := PREFIX.match(line):
            spans.append(Span("_source", *prefix.span(prefix.lastindex or 0)))
        yield spans


def _fields(line: bytes, start: int, stop: int, whole: bool) -> Iterator[Span]:
    seen = set()
    while start < stop:
        bar = line.find(b"|", start, stop)
        end = stop if bar < 0 else bar
        found = FIELD.fullmatch(line, start, end) if (bar >= 0 or whole) and end - start < LONGEST_FIELD else None
        start = end + 1
        if not found:
            continue
        name = found[1].decode("utf-8", "replace")
        is_loss = name.endswith("loss") and found[2]  # only Megatron of 2019 omits the colons
        known = COLUMNS.get(name) or ((re.sub(r"\W+", "_", name), 1.0, 1.0) if is_loss else None)
        if known and known[0] not in seen:
            seen.add(known[0])
            column, multiplier, divisor = known
            yield Span(column, *found.span(3), multiplier * PREFIXES[(found[4] or b"")[:-5]], divisor)


def memories(line: bytes) -> Iterator[dict[str, float]]:
    """Rank and bytes of each memory report in a line; old versions name no rank, which counts as 0."""
    found = list(MEMORY.finditer(line))
    for this, after in zip(found, [*found[1:], None], strict=False):
        text = line[this.end() : after.start() if after else len(line)]
        row = {"rank": float(this[1] or 0), "iteration": float(this[2])}
        for part in text.split(b"|"):
            if field := re.match(rb"\s*((?:max )?(?:allocated|reserved)):\s*(\d+(?:\.\d*)?)", part):
                row[field[1].decode().replace(" ", "_")] = float(field[2]) * 2**20
        yield row


def validation_spans(line: bytes) -> list[Span]:
    """Iteration and loss of an evaluation; [] for other lines."""
    found = VALIDATION.search(line)
    return [Span("iteration", *found.span(1)), Span("lm_loss", *found.span(2))] if found else []


def timers(line: bytes) -> list[Span]:
    """Megatron's timers in a line, in seconds: `time (ms) | name: ..`, or a line of the table over ranks.

    Of (min, max), the maximum has the timer's name and the minimum is `<name> min`.
    """
    if head := TIMERS.search(line):
        spans: list[Span] = []
        start, seen = head.end(), {"", "iteration"}
        for part in line[start:].split(b"|"):
            field = FIELD.fullmatch(part) if len(part) < LONGEST_FIELD else None
            name = field[1].decode("utf-8", "replace") if field and field[2] else ""
            # joined lines name a timer twice: the first counts
            if field and name not in seen:
                seen.add(name)
                begin, end = field.span(3)
                spans.append(Span(name, start + begin, start + end, 1.0, 1e3))
            start += len(part) + 1
        return spans
    if b"...:" in line and (
        found := TIMER.match(line) or TIMER.match(b" " * (len(line) - len(rest := body(line))) + rest)
    ):
        name = found[1].decode()
        last = [Span(name, *found.span(3 if found[3] else 2), 1.0, 1e3)]
        return [Span(f"{name} min", *found.span(2), 1.0, 1e3), *last] if found[3] else last
    return []


def rank(line: bytes) -> float:
    """The rank that the line's prefix names; NaN without one."""
    prefix = PREFIX.match(line)
    return float(prefix[prefix.lastindex or 0]) if prefix and (prefix.lastindex or 0) <= RANKS else float("nan")


def source(line: bytes) -> float:
    """The number of the rank, process or host that the line's prefix names; NaN without one."""
    prefix = PREFIX.match(line)
    return float(prefix[prefix.lastindex or 0]) if prefix else float("nan")


def body(line: bytes) -> bytes:
    """The line without what launchers, collectors of logs and loggers put before it."""
    for _ in range(3):
        found = PREFIX.match(line) or LEAD.match(line)
        if not found:
            break
        line = line[found.end() :]
    return line


def dialect(line: bytes) -> str:
    """Which of Megatron's relatives printed the iteration line; "" where nothing but its number shows it."""
    if b"samples/sec:" in line or b"approx flops per GPU" in line:
        return "gpt-neox"
    if b"(tgs)" in line or b"actual seqlen" in line:
        return "deepspeedai"
    if b"iteration (s):" in line or b"consumed tokens" in line or b"TFLOPs:" in line:
        return "megatron-deepspeed-2022"
    if b"throughput per GPU" in line or re.search(rb"\[\d{4}-\d\d-\d\d [\d:.]+\]\s+iteration", line):
        return "megatron-lm"
    return "megatron-2021" if b"elapsed time per iteration" in line else ""
