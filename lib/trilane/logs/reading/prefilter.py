"""Which lines of a block may matter, found for thousands of lines at once, so that all others cost next to nothing.

Every line that matters contains one of some four-byte pieces of words. All pieces of a block are hashed and looked up;
a line selected by mistake costs only the time to read it.
"""

from functools import cache

import numpy as np

# What a line may hold, as bits.
STEP, NUMBER, ARGUMENT, END = 1, 2, 4, 8
TABLE = 32  # a word of a dialect that has a table
MAYBE = 16  # an argument, if a dump of arguments is open
ALL = 255

# Pieces of four bytes, a comma between them.
PIECES = {
    STEP: "iter,(ms)",
    NUMBER: "memo,...:, MA ,MemA,step,ampl,r GP,r gp,loss,runt,MiB ,busb,hrou,dura,aten,aram,fwd+,fwd ,bwd ,Tera,floa,"
    "OMP_,cmd ,lera,half,bflo,int3,int8,int6,doub,ch s,aral,ld s,rgum,torc,unni,info,g jo,it/s,s/it,UUID",
    ARGUMENT: " ..., .. ,rgum,ld s,padd,  --,:pri,>>  ",
    END: "rror,xcep,CANC,LIMI,FAIL,NCCL,nccl,chdo,med ,meou,rmin,Segm,rrup,aile,of m,Out ,MEMO,lloc,ALLO,srun,exit,"
    "xite,Kill,kill,nk  ,NaN , nan,igna,rain,allt,ry l,Bus ,andw,fail,topp,ceba,rged,"
    "REEM,reem,UNCO,Xid ,llen,s lo,dle ,ce l,quot,Stal,d-on,k do,k is,nplu,pani,o mo,t fo,lefi,FATA,reac,Errn,etry,"
    "SIGK,TERM,host,nowl,join,EXHA,DEAD,UNAV,ABOR,muni,meLi,mism",
}
FIRST_BYTE = {ord("+"): ARGUMENT | NUMBER, ord("-"): ARGUMENT, ord("|"): NUMBER}
SHORT = 8  # bytes: all lines up to this length are read, such as the `12:` of all_reduce_bench
HASH_BITS = 18  # with 16, one line in ten was selected by mistake
MULTIPLIER = np.uint32(2654435761)  # Knuth's multiplicative hash


def _hash(codes: np.ndarray) -> np.ndarray:
    return (codes * MULTIPLIER) >> np.uint32(32 - HASH_BITS)


@cache
def lookup(words: tuple[bytes, ...] = ()) -> np.ndarray:
    """The bits of each hash; lines with one of `words`, of four bytes or more, may be of a dialect that has a table."""
    table: np.ndarray = np.zeros(1 << HASH_BITS, np.uint8)
    for word in words:
        table[_hash(np.frombuffer(word[-4:], "<u4"))] |= TABLE
    for bit, pieces in PIECES.items():
        for piece in pieces.split(","):
            table[_hash(np.frombuffer(piece.encode(), "<u4"))] |= bit
    return table


def line_kinds(lines: list[bytes], pieces: np.ndarray) -> np.ndarray:
    """For each line the sum of the bits STEP, NUMBER, ARGUMENT and END that it may hold; `pieces` is a lookup()."""
    if not lines:
        return np.zeros(0, np.uint8)
    block = b"\n".join(lines) + b"\n\0\0\0\0"
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    starts = np.cumsum(lengths + 1) - lengths - 1
    hits: np.ndarray = np.zeros(len(block), np.uint8)
    for offset in range(4):
        codes = np.frombuffer(block, "<u4", (len(block) - offset) // 4, offset)
        hits[offset : offset + 4 * len(codes) : 4] = pieces[_hash(codes)]
    kinds = np.bitwise_or.reduceat(hits, starts)
    first = np.frombuffer(block, np.uint8)[starts]
    for byte, bits in FIRST_BYTE.items():
        kinds[first == byte] |= bits
    kinds[(lengths > 0) & (lengths <= SHORT)] |= NUMBER
    return kinds
