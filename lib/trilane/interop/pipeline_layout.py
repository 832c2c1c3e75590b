"""Megatron-Core's pipeline_model_parallel_layout, and the topology that deals layers alike.

Grammar, rules and order of stages: transformer/pipeline_parallel_layer_layout.py of megatron-core
0.16.1 to 0.19.2.
"""

import re
from typing import Any

from trilane.config.parallelism import LARGEST, PARTITION
from trilane.utils.validation import require

LAYOUT = "pipeline_model_parallel_layout"
REPEATS = (r"\(([^)]+)\)\*(\d{1,9})", r"(.)\*(\d{1,9})")  # groups first, then letters


def layout_stages(layout: str) -> list[str]:
    """The letters of each virtual stage, number chunk x pp + rank: E embedding, t layer, L head.

    layout_stages("Et|(tt|)*2,L")    ["Et", "tt", "tt", "L"]
    """
    text = layout.replace(",", "")
    for pattern in REPEATS:
        length = sum(len(part) * int(count) for part, count in re.findall(pattern, text))
        require(length <= LARGEST, LAYOUT, layout, f"must have at most {LARGEST} letters")
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    require("m" not in text, LAYOUT, layout, "a plan predicts one token at a time, without m")
    is_whole = re.fullmatch(r"E(t|\|(?!\|))*L", text) is not None
    require(is_whole, LAYOUT, layout, "must be E, t of stages divided by |, none empty, then L")
    return text.split("|")


def layout_fields(layout: str, layers: int, pp: int) -> dict[str, Any]:
    """The fields of a topology that deal so many layers to `pp` stages as the layout does; raises
    ValueError where none do.
    """
    stages = layout_stages(layout)
    counts = [stage.count("t") for stage in stages]
    require(sum(counts) == layers, LAYOUT, layout, f"has {sum(counts)} layers, not {layers}")
    chunks, left = divmod(len(stages), pp)
    require(not left, LAYOUT, layout, f"has {len(stages)} stages, which pp={pp} must divide")
    if pp > 1 and len({*map(len, stages)}) == 1:
        return {"interleaving": chunks, "partition": PARTITION[1]}
    ranks = counts[:pp]
    each = ranks[pp // 2]
    is_alike = counts == ranks * chunks and min(ranks) > 0 and {*ranks[1:-1]} <= {each}
    rule = "a plan has stages alike, by layers or letters, but for the layers of the first and last"
    require(is_alike, LAYOUT, layout, rule)
    first, last = [count * chunks if count != each else 0 for count in (ranks[0], ranks[-1])]
    return {"interleaving": chunks, "first_stage_layers": first, "last_stage_layers": last}
