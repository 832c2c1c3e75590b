"""Launch arguments in a log: the dumps of Megatron and DeepSpeed, `bash -x` traces, lines with the world size."""

import math
import re

Value = str | int | float | bool | None
BEGIN, END = re.compile(rb"-{6} arguments -{6}"), re.compile(rb"-{6} end of arguments")
DOTTED = re.compile(rb"^(?:\[\w+\]:|[\w.-]+: )?\s{1,6}([A-Za-z]\w*) \.{2,} ?(?!:)(.*)$")
UNDOTTED = re.compile(rb"^(?:\[\w+\]:|[\w.-]+: )?\s{1,4}([a-z]\w*)\s{2,}(\S.*)$")
DEEPSPEED = re.compile(rb"\[config\.py:\d+:print(?:_config)?\]\s+(\w+) (?:\.{2,}|\s) ?(.*)$")
NEOX_END = re.compile(rb"(?<!\.)\.{3,}(?:updated|default)$")
TRACE = re.compile(rb"^(?:\d+: )?(?:\++ |\s*--[a-z])")
OPTION = re.compile(rb"(?:^|\s)--([A-Za-z][\w-]*)(?:[ =]+((?!-)[^\s'\"\\]+|-[\d.]+\S*|\"[^\"]*\"|'[^']*'))?")
WORLD = re.compile(rb"using world size: (\d{1,9})")
PARALLEL = re.compile(rb"((?:data|tensor|pipeline|context)?-?(?:model-)?parallel)[- ]size: (\d{1,9})")
VOCAB = re.compile(rb"padded vocab \(size: (\d{1,15})\).{0,200}\(new size: (\d{1,15})\)")
PAIR = re.compile(r"\b(\w+)=([^,\s]+)")
LARGEST = {int: 1 << 63, float: math.inf}
SECRET = re.compile(r"(^|_)(key|api_key|token|password|secret)$")


def dumped(line: bytes, inside: bool) -> tuple[str, Value] | None:
    """The argument in a line `  name ...... value` of a dump; without dots, as for long names, only `inside` one."""
    found = DOTTED.match(line) or (UNDOTTED.match(line) if inside else None)
    if found:
        return _pair(found[1], NEOX_END.sub(b"", found[2].rstrip()))
    if found := DEEPSPEED.search(line):
        name, value = _pair(found[1], found[2].strip())
        return f"deepspeed.{name}", value
    return None


def traced(line: bytes) -> dict[str, Value]:
    """The options of a command traced by `bash -x`; a bare option is True. config_overrides a=1,b=2 is split."""
    if not TRACE.match(line) or b"--" not in line:
        return {}
    given: dict[str, Value] = {}
    for name, raw in OPTION.findall(line):
        key, value = _pair(name.replace(b"-", b"_"), raw.strip(b"\"'"))
        given[key] = True if value == "" else value
        if key == "config_overrides":
            given |= {k: read_value(v) for k, v in PAIR.findall(str(value))}
    return given


def world(line: bytes) -> dict[str, Value]:
    """World size, parallel sizes and padded vocabulary, from the lines in which Megatron prints them."""
    given: dict[str, Value] = {}
    if found := WORLD.search(line):
        given["world_size"] = int(found[1])
        for name, size in PARALLEL.findall(line):
            given[name.decode().replace("-", "_") + "_size"] = int(size)
    if found := VOCAB.search(line):
        given |= {"vocab_size": int(found[1]), "padded_vocab_size": int(found[2])}
    return given


def read_value(text: str) -> Value:
    """The text as None, bool, int below 2^63 or finite float; any other text unchanged."""
    words: dict[str, Value] = {"None": None, "True": True, "False": False, "true": True, "false": False}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if abs(value) < LARGEST[kind] else text  # JSON has no infinity
    return text


def _pair(name: bytes, raw: bytes) -> tuple[str, Value]:
    key = name.decode()
    hidden = SECRET.search(key) is not None and raw not in (b"None", b"")
    return key, "(hidden)" if hidden else read_value(raw.decode("utf-8", "replace"))
