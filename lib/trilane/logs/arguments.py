"""Launch arguments in a log: the dumps of Megatron and DeepSpeed, `bash -x` traces, lines with
counts and sizes.
"""

import contextlib
import functools
import re

from trilane.utils.validation import shipped_json

Value = str | int | float | bool | None
DOTTED = re.compile(rb"^(?:\[\w+\]:|[\w.-]+: )?\s{1,6}([A-Za-z]\w*) \.{2,}+ ?(?!:)(.*)$")
# a long name is printed without dots
UNDOTTED = re.compile(rb"^(?:\[\w+\]:|[\w.-]+: )?\s{1,4}([a-z]\w{30,99})\s{2,}(\S.*)$")
DEEPSPEED = re.compile(rb"\[config\.py:\d+:print(?:_config)?\]\s+(\w+) (?:\.{2,}|\s) ?(.*)$")
DEFAULT = re.compile(rb"(?<!\.)\.{3,}(?:updated|default)$")  # which gpt-neox puts behind a value
TRACE = re.compile(rb"(?:\d+: )?(?:\++ |\s*--[a-z])")
OPTION = re.compile(
    rb"(?:^|\s)--([A-Za-z][\w-]*)(?:[ =]+((?!-)[^\s'\"\\]+|-[\d.]+\S*|\"[^\"]*\"|'[^']*'))?"
)
SECRET = re.compile(r"(^|_)(key|api_key|token|password|secret)$")
WORDS: dict[str, Value] = {"None": None, "True": True, "true": True, "False": False, "false": False}
MAX_INT = 1 << 63
INFINITY = float("inf")


@functools.lru_cache(20_000)  # every rank may print the same dump
def dumped(line: bytes) -> tuple[str, Value] | None:
    """The argument in a line `  name ...... value` of a dump."""
    if match := DOTTED.match(line) or UNDOTTED.match(line):
        return _pair(match[1], DEFAULT.sub(b"", match[2].rstrip()))
    if match := DEEPSPEED.search(line):
        name, value = _pair(match[1], match[2].strip())
        return f"deepspeed.{name}", value
    return None


def traced(line: bytes) -> dict[str, Value]:
    """The options of a command traced by `bash -x`; a bare option is True. config_overrides a=1,b=2
    is split.
    """
    given: dict[str, Value] = {}
    if b"--" not in line or not TRACE.match(line):
        return given
    for name, text in OPTION.findall(line):
        key, value = _pair(name.replace(b"-", b"_"), text.strip(b"\"'"))
        given[key] = True if value == "" else value
        if key == "config_overrides":
            for part, number in re.findall(r"\b(\w+)=([^,\s]+)", str(value)):
                given[part] = read_value(number)
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
    numbers: dict[str, Value] = {}
    for pattern in size_patterns():
        if match := pattern.search(line):
            for name, text in match.groupdict().items():
                numbers[name] = int(text.replace(b",", b""))
    return numbers


def read_value(text: str) -> Value:
    """The text as None, bool, int below 2^63 or finite float; any other text unchanged."""
    if text in WORDS:
        return WORDS[text]
    for kind, most in ((int, MAX_INT), (float, INFINITY)):  # JSON has no infinity
        with contextlib.suppress(ValueError):
            number = kind(text)
            return number if abs(number) < most else text
    return text


def _pair(name: bytes, text: bytes) -> tuple[str, Value]:
    key = name.decode()
    if SECRET.search(key) and text not in (b"None", b""):
        return key, "(hidden)"
    return key, read_value(text.decode("utf-8", "replace"))
