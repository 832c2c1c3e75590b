"""Units in tables that people typed: the factor of a cell to seconds, billions, GB, TFLOP/s or a count."""

import re

from trilane.logs.table import NAN

SECONDS = {"s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "min": 60.0}
BILLIONS = {"k": 1e-6, "m": 1e-3, "b": 1.0, "bn": 1.0, "t": 1e3, "million": 1e-3, "billion": 1.0, "billions": 1.0}
GIGABYTES = {"mb": 1e-3, "mib": 1 / 1024, "gb": 1.0, "gib": 1.0, "g": 1.0, "m": 1e-3, "tb": 1e3, "tib": 1e3}
TERA = {"g": 1e-3, "t": 1.0, "p": 1e3}
RATE_OF_WORK = re.compile(r"([gtp]?)flops?(?:/s|/sec|ps)?(?:/(?:gpu|device|chip))?$")

EACH = re.compile(r"(?:/|\s?per\s)(?:it|its|iters?|iterations?|steps?|gpus?|cards?|devices?|nodes?)$")  # s/it, GB/GPU

# A number of these has no unit, or names what it counts; all others are another quantity, such as a batch in tokens.
COUNTS = {"gpus", "nodes", "gpus_per_node", "dp", "tp", "cp", "pp", "chunks", "mbs", "gbs", "heads", "hidden", "layers"}
COUNTED = re.compile(
    r"(?:gpus?|nodes?|cards?|layers?|heads?|seqs?|sequences|samples|micro-?batch(?:es)?|steps|stages|#|x)$"
)
THOUSAND = {"seq": 1024.0, "vocab": 1000.0}  # 4k tokens, and a vocabulary of 250k

# Columns that are a time per iteration only where header or cells have a unit of time, or of iterations per second.
UNSURE = {"time", "throughput", "speed"}
UNCERTAIN = "?"  # the unit where only the TFLOPs of its row can show that it is seconds


def scale(name: str, number: float, unit: str) -> float:
    """The factor from a cell's number to seconds, billions, GB, TFLOP/s or a count; NaN if its unit is another's."""
    unit = EACH.sub("", unit.lower().strip())
    if name == "tflops":
        match = RATE_OF_WORK.match(unit)
        return TERA[match[1] or "t"] if match else 1.0
    if name == "size" and not unit and number >= 1e6:
        return 1e-9
    if name in THOUSAND and unit == "k":
        return THOUSAND[name]
    if name == "seq" and unit in ("t", "tokens"):
        return 1.0
    if name in COUNTS or name in THOUSAND:
        return 1.0 if not unit or COUNTED.match(unit) else NAN
    units = {"time": SECONDS | {UNCERTAIN: 1.0}, "size": BILLIONS, "mem": GIGABYTES}.get(name)
    return units.get(unit, NAN) if units and unit else 1.0


def is_rate(unit: str) -> bool:
    """Whether the unit counts iterations per second."""
    return bool(re.fullmatch(r"(it|its|iter|iters|iterations)/s(ec)?", unit.lower()))


def of_time(unit: str) -> bool:
    """Whether the unit is one of time, or of iterations per second."""
    return EACH.sub("", unit.lower()) in SECONDS or is_rate(unit)
