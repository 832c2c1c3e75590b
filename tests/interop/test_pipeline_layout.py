"""The stages of drawn layouts are Megatron-Core's, and those of the engine that trains the plan."""

import random
import re
from dataclasses import replace

import pytest
from support import small_plan

from trilane.config.parallelism import Topology
from trilane.interop.pipeline_layout import layout_fields, layout_stages


def drawn(draw: random.Random, pp: int, chunks: int) -> str:
    """Stages with other ends, or alike by letters, or of no plan's form."""
    first, each, last = (draw.randint(1, 4) for _ in range(3))
    counts = [first, *[each] * (pp - 2), last] * chunks
    form = draw.choice(("ends", "letters", "any"))
    if form == "letters":
        counts = [each, *[each + 1] * (pp * chunks - 2), each]
    elif form == "any":
        draw.shuffle(counts)
    text = "|".join("t" * count for count in counts)
    if draw.choice((True, False)):
        text = re.sub(r"(t+\|)\1+", lambda run: f"({run[1]})*{run[0].count('|')},", text)
    text = re.sub("t+", lambda run: draw.choice((run[0], f"t*{len(run[0])}")), text)
    return f"E{text}L"


@pytest.mark.slow  # megatron.core takes seconds to import
def test_the_stages_of_200_layouts_are_megatron_cores_and_the_engines():
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    from trilane_engine.model.gpt import transformer_config

    draw, small, read = random.Random(4), small_plan(), 0
    for _ in range(200):
        pp, chunks = draw.randint(2, 5), draw.randint(1, 3)
        layout = drawn(draw, pp, chunks)
        theirs = PipelineParallelLayerLayout(layout, pp).layout
        turns = [(rank, chunk) for chunk in range(chunks) for rank in range(pp)]
        counts = [theirs[rank][chunk].count(LayerType.decoder) for rank, chunk in turns]
        assert [stage.count("t") for stage in layout_stages(layout)] == counts
        try:
            fields = layout_fields(layout, sum(counts), pp)
        except ValueError:
            continue
        read += 1
        shape = replace(small.shape, num_layers=sum(counts))
        plan = replace(small, shape=shape, topology=Topology(pp=pp, gbs=pp, **fields))
        settings = transformer_config(plan)
        assert [get_num_layers_to_build(settings, chunk, rank) for rank, chunk in turns] == counts
    assert read > 120
