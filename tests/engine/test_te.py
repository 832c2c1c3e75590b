"""Transformer Engine, of which little can run here: what asks for it, what is handed to it."""

from dataclasses import replace
from pathlib import Path

import pytest
from plans import small_plan

from trilane.config.cluster import cluster
from trilane.config.engines import require_trainable
from trilane.config.parallelism import Topology

FP8 = Topology(precision="fp8")
OVERLAP = Topology(tp=2, sequence_parallel=True, overlap_tp=True)


@pytest.mark.parametrize("topology", [FP8, OVERLAP], ids=["fp8", "overlap"])
def test_what_needs_transformer_engine_is_refused_without_it(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trilane.config.engines.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs Transformer Engine"):
        require_trainable(topology)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:full scope")
def test_megatron_core_takes_what_it_is_given() -> None:
    """Its settings as they are; its classes need CUDA."""
    from trilane_engine.cpu import enable_cpu

    enable_cpu()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from trilane_engine.model import te

    plan = replace(
        small_plan(Path("data")),
        cluster=cluster("dgx-h100"),
        topology=replace(OVERLAP, precision="fp8"),
    )
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config = TransformerConfig(**sizes, bf16=True, **te.settings(plan))
    assert te.is_chosen(config) and config.tp_comm_overlap and config.fp8_recipe == "tensorwise"
