"""Transformer Engine and ft_launcher, of which little can run here: what asks for them, which
versions do.
"""

import ast
import inspect
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from plans import small_plan

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.config.engines import require_trainable, untrainable_reason
from trilane.config.parallelism import Topology

FP8 = Topology(precision="fp8")
OVERLAP = Topology(tp=2, sequence_parallel=True, overlap_tp=True)
LACKS = "needs Transformer Engine, which is not installed here"
# what a topology and run.fused ask for, versions of megatron-core and Transformer Engine -> the
# beginning of why not
VERSIONS = [
    (FP8, "auto", "0.16.1", "", f"precision=fp8: {LACKS}"),
    (FP8, "auto", "", "2.8.0", None),
    (
        FP8,
        "auto",
        "0.16.1",
        "2.8.0+c47f329b",
        "transformer-engine=2.8.0+c47f329b: megatron-core 0.16.1 goes with >=2.9,",
    ),
    (
        OVERLAP,
        "off",
        "0.16.1",
        "2.20.2",
        "transformer-engine=2.20.2: megatron-core 0.16.1 goes with >=2.9,<2.12: pip ",
    ),
    (OVERLAP, "off", "0.17.1", "2.20.2", None),
    (FP8, "auto", "0.19.2", "2.9.0", None),
    (
        FP8,
        "auto",
        "0.20.0rc1",
        "3.0",
        "transformer-engine=3.0: megatron-core 0.20.0rc1 goes with >=2.9,<2.21: pip ",
    ),
    (
        Topology(),
        "te",
        "0.19.2",
        "nightly",
        "transformer-engine=nightly: megatron-core 0.19.2 goes with >=2.9,<2.21",
    ),
    (FP8, "te", "0.16.1", "2.9.0+70f53666", None),
    (OVERLAP, "on", "0.16.1", "2.11.0", None),
    (Topology(), "auto", "0.16.1", "2.20.2", None),
]
RESILIENCY = [
    ("0.16.1", "0.4.1", True),
    ("0.17.1", "0.4.1", False),
    ("0.19.2", "0.5.0", False),
    ("0.19.2", "0.7.0", True),
    ("0.19.2", "", True),
]


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    monkeypatch.setattr(
        "trilane.config.engines.installed_version", lambda name, path=(): versions.get(name, "")
    )


@pytest.mark.parametrize(
    ("topology", "fused", "megatron", "installed", "reason"), VERSIONS, ids=str
)
def test_a_version_that_megatron_core_does_not_work_with_is_one_line(
    topology: Topology,
    fused: str,
    megatron: str,
    installed: str,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.16.1's own extra `dev`: transformer-engine >= 2.9.0a0, < 2.12.0; 0.17 and newer call what
    2.9 to 2.20 have.
    """
    install(monkeypatch, {"megatron-core": megatron, "transformer-engine": installed})
    why = untrainable_reason(topology, fused)
    assert why == reason or why.startswith(reason)


@pytest.mark.parametrize(("megatron", "installed", "fits"), RESILIENCY)
def test_megatron_core_from_017_on_is_not_imported_beside_an_old_resiliency_ext(
    megatron: str, installed: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nvrx.py: NVRX_MIN_VERSION is 0.6.0 in 0.17.1, 0.18.2 and 0.19.2, and the check stands at
    the import.
    """
    install(monkeypatch, {"megatron-core": megatron, "nvidia-resiliency-ext": installed})
    line = (
        f"nvidia-resiliency-ext={installed}: megatron-core {megatron} goes with >=0.6: pip install "
    )
    with nullcontext() if fits else pytest.raises(ValueError, match=re.escape(line)):
        require_trainable(Topology())


def test_training_without_it_is_refused_before_any_process_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    plan = replace(small_plan(tmp_path, source="mock"), cluster=cluster("dgx-h100"), topology=FP8)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    assert main(["train", str(tmp_path / "plan.json")]) == 2
    assert f"precision=fp8: {LACKS}" in capsys.readouterr().err
    assert not (tmp_path / "ranks").exists()


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
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, bf16=True, **te.settings(plan)
    )
    assert te.is_chosen(config) and config.tp_comm_overlap and config.fp8_recipe == "tensorwise"
    tree = ast.parse(inspect.getsource(transformer_engine))
    found = {
        (kind.name, method.name): [a.arg for a in (*method.args.args, *method.args.kwonlyargs)]
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, ast.FunctionDef)
    }
    both = {
        "config",
        "init_method",
        "bias",
        "skip_bias_add",
        "is_expert",
        "tp_comm_buffer_name",
        "tp_group",
    }
    assert both | {"gather_output", "stride"} < {*found["TEColumnParallelLinear", "__init__"]}
    assert both | {"input_is_parallel"} < {*found["TERowParallelLinear", "__init__"]}
    given = ["query", "key", "value", "attention_mask", "attn_mask_type"]
    assert found["TEDotProductAttention", "forward"][1:6] == given
    norm = inspect.signature(transformer_engine.TENorm.__new__)
    norm.bind(te.Norm, config=config, hidden_size=64, eps=1e-5)
