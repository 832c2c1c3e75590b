"""Transformer Engine, of which little can run here: what asks for it, which versions do."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
from plans import small_plan

from trilane.config.cluster import cluster
from trilane.config.engines import untrainable_reason
from trilane.config.parallelism import Topology

FP8 = Topology(precision="fp8")
OVERLAP = Topology(tp=2, sequence_parallel=True, overlap_tp=True)
LACKS = "needs Transformer Engine, which is not installed here"


def test_what_needs_an_engine_that_is_not_installed_is_one_line(monkeypatch) -> None:
    monkeypatch.setattr("trilane.config.engines.find_spec", lambda name: None)
    assert untrainable_reason(FP8) == f"precision=fp8: {LACKS}"
    assert untrainable_reason(Topology(), "te") == f"run.fused=te: {LACKS}"
    monkeypatch.setattr("trilane.config.engines.find_spec", lambda name: name)
    assert untrainable_reason(FP8) is untrainable_reason(OVERLAP) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:full scope")
def test_megatron_core_takes_what_it_is_given() -> None:
    """Its settings as they are; its classes, which only CUDA can make, by the parameters in their
    source.
    """
    from trilane_engine.cpu import enable_cpu

    enable_cpu()
    from megatron.core.extensions import transformer_engine
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
    parameters = {}
    for kind in ast.parse(inspect.getsource(transformer_engine)).body:
        for method in kind.body if isinstance(kind, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef):
                given = [a.arg for a in (*method.args.args, *method.args.kwonlyargs)]
                parameters[kind.name, method.name] = given
    both = {"config", "init_method", "bias", "skip_bias_add", "is_expert", "tp_group"}
    assert both | {"gather_output", "stride"} < {*parameters["TEColumnParallelLinear", "__init__"]}
    assert both | {"input_is_parallel"} < {*parameters["TERowParallelLinear", "__init__"]}
    given = ["query", "key", "value", "attention_mask", "attn_mask_type"]
    assert parameters["TEDotProductAttention", "forward"][1:6] == given
    norm = inspect.signature(transformer_engine.TENorm.__new__)
    norm.bind(te.Norm, config=config, hidden_size=64, eps=1e-5)
