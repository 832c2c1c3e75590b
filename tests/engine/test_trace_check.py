"""Plans of the benchmark that holds traces of the real engines against the formulas,
benchmarks/trace_check.py.
"""

import sys

import pytest
from support import REPOSITORY

from trilane.config.cluster import cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from trace_check import FAMILIES, check, difference, limit

FAMILIES["qwen3"] = FAMILIES["llama"] | {"kv_channels": 128, "qk_layernorm": True}
FAMILIES["shared"] = FAMILIES["mixtral"] | {
    "first_dense": 1,
    "shared_experts": 2,
    "shared_ffn": 512,
    "shared_gate": True,
}
BF16 = {"precision": "bf16", "fp32_gradients": True, "gbs": 8}
HOST = {"recompute": "full", "offload_checkpoints": True}
INSTANCES = {"dp": 4, "shards": 2, "gbs": 16}
PLANS = {
    "megatron": (
        "qwen3",
        {**BF16, "tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "selective"},
    ),
    "megatron experts": (
        "shared",
        {**BF16, "tp": 2, "ep": 2, "zero": 1, "sequence_parallel": True, **INSTANCES},
    ),
    "deepspeed-3d": (
        "gpt2",
        {**BF16, "tp": 2, "pp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, **HOST},
    ),
    "hf-zero3": ("llama", {**BF16, "dp": 4, "zero": 3}),
    "deepspeed-zero": ("bloom", {**BF16, "tp": 2, "dp": 2, "zero": 1, "recompute": "full"}),
    "megatron inputs on the host": ("gpt2", {**BF16, "pp": 2, **HOST}),
}


def plan_of(name: str) -> Plan:
    (family, topology), engine = PLANS[name], name.split()[0]
    sizes = {
        "num_layers": 2,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "seq_length": 1024,
        "vocab_size": 32768,
    }
    shape = ModelShape(**sizes, **FAMILIES[family])
    return Plan(
        label=engine,
        shape=shape,
        topology=Topology(**topology),
        engine=engine,
        cluster=cluster("jz-a100-80g"),
    )


@pytest.mark.filterwarnings("ignore")  # of the libraries, which a process of its own would print
@pytest.mark.parametrize("name", PLANS)
def test_the_real_engine_holds_and_computes_what_the_formulas_say(name: str):
    """Bytes of each kind of memory within 2 %, FLOPs within 0.1 %."""
    found = check(plan_of(name))
    assert not isinstance(found, str), found
    assert {"weights", "gradients", "optimizer", "activations", "flops"} <= {
        row["quantity"] for row in found
    }
    for row in found:
        off = difference(row["traced"], row["predicted"])
        assert not abs(off) > limit(row["quantity"]), row  # NaN: not predicted
    sent = {row["quantity"]: row["traced"] for row in found}.get("all-to-all ep bytes")
    if (
        sent
    ):  # two copies of each of 512 tokens there and back, forward and backward, 4 microbatches
        assert sent == pytest.approx(4 * 4 * 2 * 512 * 1024 * 2, rel=0.01)
