"""Launch arguments in a log: the dumps of Megatron and DeepSpeed, `bash -x` traces, lines with
counts and sizes.
"""

import functools
import math
import re

from trilane.utils.validation import shipped_json

Value = str | int | float | bool | None
BEGIN, END = re.compile(rb"-{6} arguments -{6}"), re.compile(rb"-{6} end of arguments")
DOTTED = re.compile(rb"^(?:\[\w+\]:|[\w.-]+: )?\s{1,6}([A-Za-z]\w*) \.{2,}+ ?(?!:)(.*)$")
UNDOTTED = re.compile(rb"^(?:\[\w+\]:|[\w.-]+: )?\s{1,4}([a-z]\w*)\s{2,}(\S.*)$")
DEEPSPEED = re.compile(rb"\[config\.py:\d+:print(?:_config)?\]\s+(\w+) (?:\.{2,}|\s) ?(.*)$")
OPTION = re.compile(
    rb"(?:^|\s)--([A-Za-z][\w-]*)(?:[ =]+((?!-)[^\s'\"\\]+|-[\d.]+\S*|\"[^\"]*\"|'[^']*'))?"
)


@functools.lru_cache(20_000)  # every rank may print the same dump
def dumped(line: bytes, inside: bool) -> tuple[str, Value] | None:
    """The argument in a line `  name ...... value` of a dump; without dots, as for long names, only `inside` one."""
    found = DOTTED.match(line) or (UNDOTTED.match(line) if inside else None)
    if found:  # gpt-neox ends a line with whether the value is the default
        return _pair(
            found[1], re.sub(rb"(?<!\.)\.{3,}(?:updated|default)$", b"", found[2].rstrip())
        )
    if found := DEEPSPEED.search(line):
        name, value = _pair(found[1], found[2].strip())
        return f"deepspeed.{name}", value
    return None


def traced(line: bytes) -> dict[str, Value]:
    """The options of a command traced by `bash -x`; a bare option is True. config_overrides a=1,b=2
    is split.
    """
    if b"--" not in line or not re.match(rb"(?:\d+: )?(?:\++ |\s*--[a-z])", line):
        return {}
    given: dict[str, Value] = {}
    for name, raw in OPTION.findall(line):
        key, value = _pair(name.replace(b"-", b"_"), raw.strip(b"\"'"))
        given[key] = True if value == "" else value
        if key == "config_overrides":
            given |= {k: read_value(v) for k, v in re.findall(r"\b(\w+)=([^,\s]+)", str(value))}
    return given


@functools.cache
def size_patterns() -> list[re.Pattern[bytes]]:
    """Of lines of Megatron, and of Hugging Face's Trainer, with a number each: their groups name
    the numbers.
    """
    return [re.compile(pattern.encode()) for pattern in shipped_json("log_sizes")]


def sizes(line: bytes) -> dict[str, Value]:
    """World size, parallel sizes, padded vocabulary and counts, from the lines in which programs
    print them.
    """
    if not (b" size: " in line or b">> " in line or b"(size: " in line):
        return {}
    found = [match.groupdict() for pattern in size_patterns() if (match := pattern.search(line))]
    return {name: int(text.replace(b",", b"")) for groups in found for name, text in groups.items()}


def read_value(text: str) -> Value:
    """The text as None, bool, int below 2^63 or finite float; any other text unchanged."""
    words: dict[str, Value] = {
        "None": None,
        "True": True,
        "False": False,
        "true": True,
        "false": False,
    }
    if text in words:
        return words[text]
    for kind, largest in ((int, 1 << 63), (float, math.inf)):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if abs(value) < largest else text  # JSON has no infinity
    return text


def _pair(name: bytes, raw: bytes) -> tuple[str, Value]:
    key = name.decode()
    is_secret = re.search(r"(^|_)(key|api_key|token|password|secret)$", key) and raw not in (
        b"None",
        b"",
    )
    return key, "(hidden)" if is_secret else read_value(raw.decode("utf-8", "replace"))
