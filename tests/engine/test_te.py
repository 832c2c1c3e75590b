"""Transformer Engine, which cannot run here: what asks for it, which versions do, what megatron-core is given."""

import ast
import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
from plans import small_plan

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.config.engines import untrainable_reason
from trilane.config.parallelism import Topology

FP8 = Topology(precision="fp8")
OVERLAP = Topology(tp=2, sequence_parallel=True, overlap_tp=True)
NEEDS = "needs Transformer Engine 2.9 to 2.11; "
# what a topology and run.fused ask for, the installed version -> why not
VERSIONS = [
    (FP8, "auto", None, f"precision=fp8: {NEEDS}it is not installed here"),
    (FP8, "auto", "2.8.0+c47f329b", f"precision=fp8: {NEEDS}2.8.0+c47f329b is installed here"),
    (OVERLAP, "off", "2.20.2", f"overlap_tp=True: {NEEDS}2.20.2 is installed here"),
    (Topology(), "te", "nightly", f"run.fused=te: {NEEDS}nightly is installed here"),
    (FP8, "te", "2.9.0+70f53666", None),
    (OVERLAP, "on", "2.11.0", None),
    (Topology(), "auto", None, None),
]


@pytest.mark.parametrize(("topology", "fused", "installed", "reason"), VERSIONS, ids=str)
def test_a_version_that_megatron_core_does_not_work_with_is_one_line(
    topology: Topology, fused: str, installed: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own extra `dev`: transformer-engine >= 2.9.0a0, < 2.12.0."""
    if installed:
        monkeypatch.setattr("trilane.config.engines.version", lambda name: installed)
    assert untrainable_reason(topology, fused) == reason


def test_training_without_it_is_refused_before_any_process_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    plan = replace(small_plan(tmp_path, source="mock"), cluster=cluster("dgx-h100"), topology=FP8)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    assert main(["train", str(tmp_path / "plan.json")]) == 2
    assert f"precision=fp8: {NEEDS}it is not installed here" in capsys.readouterr().err
    assert not (tmp_path / "ranks").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:full scope")
def test_megatron_core_takes_what_it_is_given() -> None:
    """Its settings as they are; its classes, which only CUDA can make, by the parameters in their source."""
    from trilane.engine.cpu import enable_cpu

    enable_cpu()
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.transformer_config import TransformerConfig

    from trilane.engine.model import te

    plan = replace(small_plan(Path("data")), cluster=cluster("dgx-h100"), topology=replace(OVERLAP, precision="fp8"))
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, bf16=True, **te.settings(plan))
    assert te.is_chosen(config) and config.tp_comm_overlap and config.fp8_recipe == "tensorwise"
    tree = ast.parse(inspect.getsource(transformer_engine))
    found = {
        (kind.name, method.name): [a.arg for a in (*method.args.args, *method.args.kwonlyargs)]
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, ast.FunctionDef)
    }
    both = {"config", "init_method", "bias", "skip_bias_add", "is_expert", "tp_comm_buffer_name", "tp_group"}
    assert both | {"gather_output", "stride"} < {*found["TEColumnParallelLinear", "__init__"]}
    assert both | {"input_is_parallel"} < {*found["TERowParallelLinear", "__init__"]}
    given = ["query", "key", "value", "attention_mask", "attn_mask_type"]
    assert found["TEDotProductAttention", "forward"][1:6] == given
    norm = inspect.signature(transformer_engine.TENorm.__new__)
    norm.bind(te.Norm, config=config, hidden_size=64, eps=1e-5)
