"""Shape, hardware, topology, plan: published sizes, laws, and one clear line for every
bad input.
"""

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from trilane.config.batch_rampup import Ramp
from trilane.config.cluster import Cluster, cluster
from trilane.config.model import ModelShape, parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan, plan_from_json
from trilane.config.training import Data, Optimizer, Run
from trilane.utils.validation import from_mapping

SMALL = parse_shape("4,128,4,128,384")


def plan(**changes):
    fields = {
        "label": "x",
        "shape": SMALL,
        "cluster": cluster("jz-a100-80g"),
        "topology": Topology(),
    }
    return Plan(**{**fields, **changes})


BLOOM_176B = replace(parse_shape("70,14336,112,2048,250880"), embedding_layernorm=True)
QWEN = {
    "activation": "swiglu",
    "ffn_hidden_size": 25600,
    "num_key_value_heads": 8,
    "normalization": "rmsnorm",
    "kv_channels": 128,
    "qk_layernorm": True,
}
QWEN |= {"positions": "rotary", "biases": "none", "tied_embeddings": False}
PUBLISHED = [
    (
        BLOOM_176B,
        176_247_271_424 + 2048 * 14336,
    ),  # bigscience/bloom's card, which has ALiBi in place of positions
    # Qwen/Qwen3-32B's files
    (replace(parse_shape("64,5120,64,40960,151936"), **QWEN), 32_762_123_264),
]


@pytest.mark.parametrize(("shape", "parameters"), PUBLISHED, ids=["bloom", "qwen3"])
def test_a_published_model_has_its_published_parameters(shape: ModelShape, parameters: int):
    assert shape.parameters == parameters


def test_planning_imports_neither_torch_nor_pandas_nor_scipy():
    modules = "config.plan planning.search planning.sizing slurm.client utils.tables cli.plan costmodel.backtest"
    code = f"import sys\nfor m in '{modules}'.split(): __import__('trilane.' + m)\n"
    code += (
        "print(sorted({'torch', 'deepspeed', 'megatron', 'pandas', 'scipy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


BLOOM = replace(SMALL, positions="alibi", embedding_layernorm=True, activation="gelu-tanh")
GATED = {"activation": "swiglu", "biases": "none"}
ZERO = {"engine": "deepspeed-zero"}
HF = {"engine": "hf-zero3", "shape": BLOOM}
H100 = cluster("dgx-h100").gpu
OWN = replace(cluster("dgx-h100"), gpu=replace(H100, shares={"matmul": 0.7}))
BAD_TOPOLOGIES = [  # fields of the topology, of the plan beside it, and how the line begins
    ({"tp": 0}, {}, "tp=0: must be a whole number of at least 1"),
    ({"zero": 1}, ZERO | {"run": Run(fused="te")}, "run.fused=te: the engine megatron alone has"),
    (
        {"precision": "fp8"},
        {"cluster": cluster("dgx-h100"), "shape": replace(SMALL, ffn_hidden_size=1000)},
        "precision=fp8: engine megatron multiplies fp8 matrices whose sides",
    ),
    ({"zero": 3}, HF, "attention=fused: engine hf-zero3 writes the scores of"),
    (
        {"gbs": 8, "pp": 2, "interleaving": 2},
        {"run": Run(ramp=Ramp(start=2, increment=3, samples=9))},
        "ramp=5: every batch size must be a multiple of mbs x dp = 1 x 1, times pp=2",
    ),
    (
        {"precision": "bf16"},
        {"cluster": cluster("jz-v100-32g")},
        "precision=bf16: V100-32GB has no bf16 matrix units",
    ),
    (
        {"dp": 16, "gbs": 16, "ep": 16, "dispatcher": "deepep"},
        {"shape": replace(SMALL, experts=16, top_k=2, expert_ffn=64, **GATED)},
        "dispatcher=deepep: needs compute capability 9.0, or 8.0 where",
    ),
    ({"precision": "fp8"}, {"cluster": OWN}, "precision=fp8: gpu.shares of H100-80GB lacks it"),
    ({}, {"run": Run(eval_interval=5, eval_iters=1)}, "run.eval_interval=5: needs a share"),
]


@pytest.mark.parametrize(("topology", "rest", "message"), BAD_TOPOLOGIES)
def test_a_topology_or_a_plan_that_cannot_be_is_one_clear_line(topology, rest, message):
    with pytest.raises(ValueError) as caught:
        plan(topology=Topology(**topology), **rest)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


BAD = [
    (lambda: replace(cluster("jz-a100-80g"), latency_s=math.nan), "cluster.latency_s=nan: must"),
    (lambda: replace(H100, shares={"matmul": 1.2}), "gpu.shares.matmul=1.2: must be a share"),
    (lambda: replace(H100, shares={"flash": [0.4, -1]}), "gpu.shares.flash=[0.4, -1]: must be"),
    (lambda: replace(H100, shares={"fp16": 0.5}), "gpu.shares=fp16: known: flash, fp4"),
    (lambda: Data(source="blend"), "data.blend=(): needs source="),
    (lambda: Data(split="949"), "data.split=949: must be shares of"),
    (lambda: Optimizer(lr=-1.0), "lr=-1.0: must be above 0"),
    (lambda: Optimizer(decay_style="WSD"), "wsd_decay_samples=0: WSD needs some"),
    (lambda: Run(skip="٣-٤"), "skip=٣-٤: must be ranges of iterations from 1 on"),
    (lambda: from_mapping(Cluster, {"name": "x"}, "cluster"), "cluster.gpu=missing: is required"),
    (
        lambda: plan_from_json({**plan().to_json(), "topolgy": 1}),
        "plan field=topolgy: known: ",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_input_is_one_clear_line(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
