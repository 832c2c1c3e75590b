"""Tells: which lines may say something, found in a whole block at once, so that the rest costs next to nothing.

Every line that matters holds one of some four-letter pieces of words. All four-byte pieces of a block are hashed and
looked up; a line that is taken by mistake only costs the time to look at it closely.
"""

import numpy as np

STEP, NUMBER, ARGUMENT, END = 1, 2, 4, 8
MAYBE = 16  # an argument, if a dump of arguments is open
ALL = 255

WORDS = {
    STEP: ["iter", "(ms)"],
    NUMBER: [
        *(
            "memo",
            "...:",
            " MA ",
            "MemA",
            "step",
            "ampl",
            "r GP",
            "r gp",
            "loss",
            "runt",
            "MiB ",
            "busb",
            "hrou",
            "dura",
        ),
        *(
            "aten",
            "aram",
            "fwd+",
            "fwd ",
            "bwd ",
            "Tera",
            "floa",
            "half",
            "bflo",
            "int3",
            "int8",
            "int6",
            "doub",
            "ch s",
        ),
        *("aral", "ld s", "rgum", "torc", "unni", "info", "g jo", "it/s", "s/it"),
    ],
    ARGUMENT: [" ...", " .. ", "rgum", "ld s", "padd", "  --", ":pri", ">>  "],
    END: [
        *(
            "rror",
            "xcep",
            "CANC",
            "LIMI",
            "FAIL",
            "NCCL",
            "nccl",
            "chdo",
            "med ",
            "meou",
            "rmin",
            "Segm",
            "rrup",
            "aile",
        ),
        *(
            "of m",
            "Out ",
            "MEMO",
            "lloc",
            "ALLO",
            "srun",
            "exit",
            "xite",
            "Kill",
            "kill",
            "nk  ",
            "NaN ",
            " nan",
            "igna",
            "rain",
            "allt",
        ),
        *("ry l", "Bus ", "andw", "fail", "topp", "ceba"),
    ],
}

FIRST = {ord("+"): ARGUMENT | NUMBER, ord("-"): ARGUMENT, ord("|"): NUMBER}  # by the first byte of the line
BITS = 18  # of the hash: with 16, one line in ten was taken by mistake
SHORT = 8  # bytes: so short lines are all looked at, such as the `12:` of all_reduce_bench
MIX = np.uint32(2654435761)  # Knuth's multiplicative hash


def _table() -> np.ndarray:
    table: np.ndarray = np.zeros(1 << BITS, np.uint8)
    for bit, words in WORDS.items():
        for word in words:
            table[_hash(np.frombuffer(word.encode(), "<u4"))] |= bit
    return table


def _hash(codes: np.ndarray) -> np.ndarray:
    return (codes * MIX) >> np.uint32(32 - BITS)


TABLE = _table()


def tells(lines: list[bytes]) -> np.ndarray:
    """For each line the kinds of things that it may say: STEP, NUMBER, ARGUMENT and END, added up; 0 for none."""
    if not lines:
        return np.zeros(0, np.uint8)
    block = b"\n".join(lines) + b"\n\0\0\0\0"
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    starts = np.cumsum(lengths + 1) - lengths - 1
    hits: np.ndarray = np.zeros(len(block), np.uint8)
    for offset in range(4):
        codes = np.frombuffer(block, "<u4", (len(block) - offset) // 4, offset)
        hits[offset : offset + 4 * len(codes) : 4] = TABLE[_hash(codes)]
    found = np.bitwise_or.reduceat(hits, starts)
    first = np.frombuffer(block, np.uint8)[starts]
    for byte, bits in FIRST.items():
        found[first == byte] |= bits
    found[(lengths > 0) & (lengths <= SHORT)] |= NUMBER
    return found
