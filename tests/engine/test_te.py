"""Transformer Engine, of which little can run here: what asks for it, which versions do."""

import re
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from plans import small_plan

from trilane.config.cluster import cluster
from trilane.config.engines import require_trainable
from trilane.config.parallelism import Topology

FP8 = Topology(precision="fp8")
OVERLAP = Topology(tp=2, sequence_parallel=True, overlap_tp=True)


# versions of megatron-core and of a package beside it -> the beginning of why not
VERSIONS = [
    ("0.16.1", {}, "transformer-engine=missing: is not"),
    ("0.16.1", {"transformer-engine": "2.20.2"}, "transformer-engine=2.20: megatron-core 0.16 go"),
    ("0.17.1", {"transformer-engine": "2.20.2"}, ""),
    (
        "0.17.1",
        {"transformer-engine": "2.20.2", "nvidia-resiliency-ext": "0.5.0"},
        "nvidia-resiliency-ext=0.5: megatron-core 0.17 goes",
    ),
    ("0.18.0rc1", {"transformer-engine": "2.20.2"}, "triton=missing: megatron-core 0.18 imports"),
]


@pytest.mark.parametrize(("megatron", "others", "reason"), VERSIONS, ids=str)
def test_a_package_that_megatron_core_does_not_work_with_is_one_line(
    megatron: str, others: dict[str, str], reason: str, monkeypatch
):
    installed = {"megatron-core": megatron, **others}

    def version(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr("trilane.config.engines.version", version)
    monkeypatch.setattr("trilane.config.engines.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}") if reason else nullcontext():
        plan = replace(small_plan(Path()), cluster=cluster("dgx-h100"), topology=FP8)
        require_trainable(plan)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:full scope")
def test_megatron_core_takes_what_it_is_given():
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
