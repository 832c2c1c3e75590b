"""Shape, hardware, topology, plan: published sizes, laws, and one clear line for every bad input."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from trilane.config.batch_rampup import Ramp
from trilane.config.cluster import Cluster, cluster
from trilane.config.model import ModelShape, padded_vocab_size, parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan, plan_from_json, read_plan
from trilane.config.training import Data, Dropout, Optimizer, Part, Run
from trilane.utils.validation import from_mapping

BLOOM = {"positions": "alibi", "embedding_layernorm": True, "activation": "gelu-tanh"}
SMALL = ModelShape(
    num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=128, vocab_size=384
)


def plan(**changes):
    fields = {
        "label": "x",
        "shape": SMALL,
        "cluster": cluster("jz-a100-80g"),
        "topology": Topology(),
    }
    return Plan(**{**fields, **changes})


BLOOM_176B = replace(parse_shape("70,14336,112,2048,250880"), embedding_layernorm=True)
LLAMA = {
    "activation": "swiglu",
    "ffn_hidden_size": 14336,
    "num_key_value_heads": 8,
    "normalization": "rmsnorm",
}
LLAMA |= {"positions": "rotary", "biases": "none", "tied_embeddings": False}
PUBLISHED = [
    (parse_shape("12,768,12,1024,50257"), 124_439_808),  # Hugging Face's gpt2
    (parse_shape("48,1600,25,1024,50257"), 1_557_611_200),  # gpt2-xl
    (
        BLOOM_176B,
        176_247_271_424 + 2048 * 14336,
    ),  # bigscience/bloom's card, which has ALiBi in place of positions
    (
        replace(parse_shape("32,4096,32,8192,128256"), **LLAMA),
        8_030_261_248,
    ),  # meta-llama/Meta-Llama-3-8B's card
]


@pytest.mark.parametrize(
    ("shape", "parameters"), PUBLISHED, ids=["gpt2", "gpt2-xl", "bloom", "llama-3-8b"]
)
def test_a_published_model_has_its_published_parameters(shape: ModelShape, parameters: int) -> None:
    assert shape.parameters == parameters


@pytest.mark.parametrize(
    ("tokens", "tp", "rows"),
    [(50257, 1, 50304), (50257, 4, 50688), (50304, 1, 50304), (1, 1, 128), (50305, 1, 50432)],
)
def test_a_vocabulary_is_padded_up_and_no_further(tokens: int, tp: int, rows: int) -> None:
    """Megatron-LM prints 50304 for GPT-2 at TP 1 and 50688 at TP 4."""
    assert padded_vocab_size(tokens, tp) == rows


def test_flops_give_the_tflops_that_the_chronicles_print():
    """Prequel, '48 node contenders': 181B, 384 GPUs, GBS 2048, 143.31 s, 112.49 TFLOPs (full
    recomputation).
    """
    shape = parse_shape("72,14336,64,2048,250880")
    assert shape.flops_per_iteration(
        2048, recompute_full=True
    ) / 143.31 / 384 / 1e12 == pytest.approx(112.49, rel=1e-3)


def test_a_plan_survives_its_json_file(tmp_path):
    original = plan(data=Data(source="mock"), optimizer=Optimizer(lr=3e-4), run=Run(train_iters=7))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**original.to_json(), "prediction": {"sec_per_it": 1.0}}))
    assert read_plan(path) == original


def test_planning_imports_neither_torch_nor_pandas_nor_scipy():
    modules = "config.plan planning.search planning.sizing slurm.client utils.tables cli.plan costmodel.backtest"
    code = f"import sys\nfor m in '{modules}'.split(): __import__('trilane.' + m)\n"
    code += (
        "print(sorted({'torch', 'deepspeed', 'megatron', 'pandas', 'scipy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


ONE_GROUP = {"num_attention_heads": 64, "num_key_value_heads": 1}
BAD_SPLITS = ("949", "9;1", "nan,1,1")
BAD_SKIPS = ("٣-٤", "5-", "5-6-7")
D3, ZERO, HF = ({"engine": name} for name in ("deepspeed-3d", "deepspeed-zero", "hf-zero3"))
EVEN = "type:transformer|embedding"
NO_ORDER = "samples, at most 17,179,869,184 can be put in an order"
BAD_TOPOLOGIES = [  # fields of the topology, of the plan beside it, and how the line begins
    ({"tp": 0}, {}, "tp=0: must be a whole number of at least 1"),
    (
        {"pp": 3},
        {},
        "pp=3: stages (times interleaving) must share the layers evenly: 3 must divide 4 layers",
    ),
    (
        {"zero": 1},
        {"engine": "deepspeed-zero", "run": Run(fused="te")},
        "run.fused=te: engine deepspeed-zero has no",
    ),
    (
        {
            "dp": 2,
            "gbs": 8,
            "zero": 1,
            "precision": "bf16",
            "fp32_gradients": True,
            "overlap_grad_reduce": True,
        },
        {"engine": "deepspeed-zero"},
        "overlap_grad_reduce=True: engine deepspeed-zero sums them after the last microbatch",
    ),
    (
        {"tp": 2},
        {"run": Run(fused="layer")},
        "run.fused=layer: compiles layers of engine megatron with tp=1",
    ),
    (
        {"precision": "fp8"},
        {"cluster": cluster("dgx-h100"), "shape": replace(SMALL, ffn_hidden_size=1000)},
        "precision=fp8: engine megatron multiplies fp8 matrices whose sides",
    ),
    (
        {"zero": 3},
        HF | {"shape": replace(SMALL, **BLOOM)},
        "attention=fused: engine hf-zero3 writes the scores of",
    ),
    (
        {"pp": 2, "last_stage_layers": 1, "partition": EVEN},
        {},
        f"partition={EVEN}: contradicts a number of layers",
    ),
    (
        {"pp": 2, "first_stage_layers": 4},
        {},
        "pp=2: stages (times interleaving) must share the layers evenly: 1 must divide 0",
    ),
    (
        {"pp": 2, "gbs": 2, "interleaving": 2, "first_stage_layers": 1, "last_stage_layers": 3},
        {},
        "interleaving=2: must",
    ),
    (
        {"pp": 6, "zero": 1, "partition": EVEN},
        D3,
        "pp=6: engine deepspeed-3d needs a transformer layer on every stage",
    ),
    (
        {"zero": 3, "attention": "scores"},
        HF | {"shape": replace(SMALL, **BLOOM), "dropout": Dropout(hidden=0.1)},
        "dropout.hidden=0.1: engine hf-zero3 drops hidden values in GPT-2 alone",
    ),
    (
        {"gbs": 8, "pp": 2, "interleaving": 2},
        {"run": Run(ramp=Ramp(start=2, increment=3, samples=9))},
        "ramp=5: every batch size must be a multiple of mbs x dp = 1 x 1, times pp=2 with interleaving",
    ),
    (
        {"tp": 8},
        {"shape": replace(SMALL, **ONE_GROUP)},
        "tp=8: must divide the channels of queries, keys and values: 132",
    ),
    (
        {"precision": "bf16"},
        {"cluster": cluster("jz-v100-32g")},
        "precision=bf16: V100-32GB has no bf16 matrix units",
    ),
    ({}, {"label": "a/b"}, "label='a/b': must be a plain folder name"),
    (
        {},
        {"run": Run(eval_interval=5, eval_iters=1)},
        "eval_interval=5: needs a share for validation in data.split",
    ),
    ({}, {"run": Run(train_iters=10**12)}, f"train_iters={10**12}: means {10**12:,} {NO_ORDER}"),
]


@pytest.mark.parametrize(("topology", "rest", "message"), BAD_TOPOLOGIES)
def test_a_topology_or_a_plan_that_cannot_be_is_one_clear_line(topology, rest, message):
    with pytest.raises(ValueError) as caught:
        plan(topology=Topology(**topology), **rest)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


BAD = [
    (
        lambda: replace(cluster("jz-a100-80g"), latency_s=math.nan),
        "cluster.latency_s=nan: must be a number, at least 0",
    ),
    (lambda: Data(blend=(Part(source="mock", weight=1),)), 'data.blend=mock: needs source="blend"'),
    (lambda: Data(source="blend"), "data.blend=empty: needs at least two sources"),
    (
        lambda: Part(source="mock", weight=0),
        "data.blend weight of mock=0: must be a number above zero",
    ),
    (
        lambda: Data(source="a/" + "b" * 241),
        f"data.source=a/{'b' * 241}: must have at most 4000 bytes, and 240 in each",
    ),
    (lambda: Optimizer(lr=-1.0), "lr=-1.0: must be above 0"),
    (lambda: Dropout(hidden=1.0), "dropout.hidden=1.0: must be at least 0, below 1"),
    *[
        (lambda split=split: Data(split=split), f"data.split={split}: must be shares of")
        for split in BAD_SPLITS
    ],
    *[
        (lambda skip=skip: Run(skip=skip), f"skip={skip}: must be ranges of iterations, such as")
        for skip in BAD_SKIPS
    ],
    (lambda: Run(skip="9-5"), "skip=9-5: 9-5 ends before it begins"),
    (
        lambda: Run(skip="5-9,9-12"),
        "skip=5-9,9-12: ranges must rise and not overlap: 9 comes after 9",
    ),
    (lambda: from_mapping(Cluster, {"name": "x"}, "cluster"), "cluster.gpu=missing: is required"),
    (
        lambda: parse_shape("70,14336"),
        "shape=70,14336: must be five whole numbers: layers,hidden,heads,seq,vocab",
    ),
    (
        lambda: plan_from_json({**plan().to_json(), "topolgy": 1}),
        "plan field=topolgy: did you mean topology? known: ",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_input_is_one_clear_line(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
