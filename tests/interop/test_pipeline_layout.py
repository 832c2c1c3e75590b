"""The stages of drawn layouts are Megatron-Core's, and those of the engine that trains the plan."""

import random
import re
from dataclasses import replace

import pytest
from support import small_plan

from trilane.config.parallelism import Topology
from trilane.interop.pipeline_layout import layout_fields, layout_stages


def drawn(draw: random.Random, pp: int, chunks: int) -> str:
    """Stages with other ends, alike by letters, or in any order."""
    first, each, last = (draw.randint(1, 4) for _ in range(3))
    ends = [first, *[each] * (pp - 2), last] * chunks
    letters = [each, *[each + 1] * (pp * chunks - 2), each]
    counts = draw.choice((ends, letters, draw.sample(ends, len(ends))))
    text = "|".join("t" * count for count in counts)
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
        pp = draw.randint(2, 5)
        layout = drawn(draw, pp, draw.randint(1, 3))
        theirs = PipelineParallelLayerLayout.parse_str_to_list(layout)
        counts = [stage.count(LayerType.decoder) for stage in theirs]
        assert [stage.count("t") for stage in layout_stages(layout)] == counts
        try:
            fields = layout_fields(layout, sum(counts), pp)
        except ValueError:
            continue
        read += 1
        shape = replace(small.shape, num_layers=sum(counts))
        plan = replace(small, shape=shape, topology=Topology(pp=pp, gbs=pp, **fields))
        settings = transformer_config(plan)
        built = [get_num_layers_to_build(settings, *divmod(n, pp)) for n in range(len(counts))]
        assert built == counts
    assert read > 120
