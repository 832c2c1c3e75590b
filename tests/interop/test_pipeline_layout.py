"""The stages of drawn layouts are Megatron-Core's, and those of the engine that trains the plan."""

import random
from dataclasses import replace

import pytest
from support import small_plan

from trilane.config.parallelism import Topology
from trilane.interop.pipeline_layout import layout_fields, layout_stages


@pytest.mark.slow  # megatron.core takes seconds to import
def test_the_stages_of_200_layouts_are_megatron_cores_and_the_engines():
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    from trilane_engine.model.gpt import transformer_config

    draw, small, read = random.Random(8), small_plan(), 0
    for _ in range(200):
        a, b, c = draw.choices(("t", "tt", "t*3"), k=3)
        count = draw.randint(1, 4)
        ends = f"E{a}|({b}|)*{count},{c}L"
        layout = draw.choice((ends, f"E({a}|{b}|{c}|)*{count}{a}|{b}|{c}L"))
        theirs = PipelineParallelLayerLayout.parse_str_to_list(layout)
        counts = [stage.count(LayerType.decoder) for stage in theirs]
        assert [stage.count("t") for stage in layout_stages(layout)] == counts
        pp = draw.choice([size for size in range(2, 7) if len(counts) % size == 0])
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
    assert read == 140
