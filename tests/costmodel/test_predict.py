"""Sizing and one prediction: published numbers, and laws that any planner must obey."""

import contextlib
import dataclasses
import functools
import itertools
import math
import random

import pytest
from recorded import compare

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import CHOICES, Topology, invalid_reason
from trilane.costmodel.calibration import Configuration, from_json, to_json
from trilane.costmodel.measured_rows import every_row
from trilane.costmodel.predict import FAR, NEAR, predict, sizes_of, support
from trilane.costmodel.shipped import calibration_for, default

A100 = cluster("jz-a100-80g")
SHAPE = parse_shape("72,14336,64,2048,250880")
BF16 = {"precision": "bf16", "recompute": "full", "zero": 1}


def measured(**change):
    """The winner of the chronicles: 72 x 14336 on 384 A100s, TP 8, PP 12, DP 4, MBS 2."""
    sizes = dict(tp=8, pp=12, dp=4, mbs=2, gbs=2048, attention="scores", **BF16)
    return Configuration(shape=SHAPE, topology=Topology(**{**sizes, **change}), cluster=A100)


def test_a_measured_run_supports_itself():
    row = every_row()[30]
    found = support(row.case)
    assert found.distance == 0 and row.row_id in [
        name for name, distance in found.nearest if distance == 0
    ]
    assert found.words.startswith("rests on measured runs such as") and found.widening == 0


@pytest.mark.parametrize(
    ("case", "differs"),
    [
        (dataclasses.replace(measured(), cluster=cluster("h200")), "card"),
        (measured(attention="fused", recompute="none"), "attention kernel"),
        (
            dataclasses.replace(measured(), shape=parse_shape("72,512,8,65536,50304")),
            "sequence length",
        ),
    ],
)
def test_a_plan_like_no_measured_run_is_named_and_its_interval_widens(case, differs):
    near, far = (predict(c).support for c in (measured(), case))
    assert near.distance < NEAR < FAR < far.distance and far.widening > 0
    assert far.words.startswith("no measured run like this") and differs == far.differs[0]
    assert math.log(predict(case).sec_hi / predict(case).sec_lo) > math.log(
        predict(measured()).sec_hi / predict(measured()).sec_lo
    )


def test_rows_of_other_software_do_not_support_the_constants_of_a_stack():
    """A DP-only Llama-2 7B: Jean Zay ran it in 2024 on a stack that the constants of 2022 miss by a
    tenth and more.
    """
    shape = dataclasses.replace(
        parse_shape("32,4096,32,4096,32000"), activation="swiglu", ffn_hidden_size=11008
    )
    case = Configuration(
        shape=shape, topology=Topology(dp=64, gbs=1024, precision="bf16", zero=1), cluster=A100
    )
    known = [
        predict(case, default(A100, stack))
        for stack in ("megatron-deepspeed", "megatron-deepspeed-2024")
    ]
    earlier, later = (p.support for p in known)
    assert earlier.distance > FAR > later.distance and earlier.words.startswith(
        "no measured run like this"
    )
    assert later.stack == "megatron-deepspeed-2024" and "(megatron-deepspeed-2024)" in later.words
    assert known[0].sec_hi / known[0].sec_lo > math.exp(2 * default(A100).half_width)


@pytest.mark.parametrize(
    ("sizes", "topology", "tokens_per_s"),
    [
        ("32,4096,32,2048,50432", dict(dp=8, mbs=6, gbs=48), 85144),
        ("32,4096,32,2048,50432", dict(dp=128, mbs=6, gbs=768), 1340830),
        ("32,2560,20,2048,50432", dict(dp=16, mbs=10, gbs=480), 386285),
        ("40,5120,40,2048,50432", dict(dp=8, mbs=2, gbs=16), 38336),
        ("48,7168,56,2048,50432", dict(dp=32, mbs=14, gbs=1344, recompute="full"), 73860),
        ("80,8192,64,2048,50432", dict(dp=64, mbs=8, gbs=2048, recompute="full"), 66523),
    ],
)
def test_an_h100_of_a_stack_that_nobody_fitted_takes_what_its_interval_allows(
    sizes, topology, tokens_per_s
):
    """MosaicML's llm-foundry, scripts/train/benchmarking/README.md (Apache-2.0): MPT on FSDP, H100
    80GB, bf16.
    """
    shape, machine = dataclasses.replace(parse_shape(sizes), biases="none"), cluster("dgx-h100")
    case = Configuration(
        shape=shape, topology=Topology(precision="bf16", zero=3, **topology), cluster=machine
    )
    found, measured_s = (
        predict(case, default(machine, "fsdp")),
        case.topology.gbs * 2048 / tokens_per_s,
    )
    assert found.sec_per_it < measured_s < found.sec_hi


def test_constants_of_runs_of_ones_own_get_a_wider_interval_far_from_these_runs():
    ran = measured(tp=1, pp=1, dp=8)
    known = dataclasses.replace(default(A100), stack="", half_width=0.05, own=sizes_of([ran, ran]))
    near, far = (predict(case, known) for case in (ran, measured()))
    assert (
        math.log(near.sec_hi / near.sec_per_it) == pytest.approx(0.05)
        and near.support.distance == 0
    )
    assert math.log(far.sec_hi / far.sec_per_it) > 0.1 and "number of GPUs" in far.support.differs
    assert far.support.words.startswith("no measured run like this; the nearest is one of your own")
    assert from_json(to_json(known)) == known and len(known.own) == 1


def test_rows_that_moved_nothing_still_widen_the_interval():
    """What refit() keeps of a prior without rows: the constants, and how far they missed."""
    known = default(cluster("h200"))
    case = dataclasses.replace(measured(tp=1, pp=1, dp=8), cluster=cluster("h200"))
    usual, missed = (predict(case, dataclasses.replace(known, half_width=w)) for w in (0.1, 0.9))
    assert known.rows == 0 and math.log(missed.sec_hi / missed.sec_per_it) >= 0.9 > math.log(
        usual.sec_hi / usual.sec_lo
    )


def test_a_prediction_faster_than_any_measured_run_says_so_and_is_less_sure():
    """No run of an A100 that ships has more than 59 % of its peak; a card's matmuls cannot pass 87
    % of it.
    """
    shape = parse_shape("32,4096,32,4096,32000")
    topology = Topology(dp=64, mbs=2, gbs=1024, zero=1, precision="bf16", attention="fused")
    case = Configuration(shape=shape, topology=topology, cluster=cluster("dgx-a100-80g"))
    usual = default(case.cluster)
    bold = dataclasses.replace(usual, pace=0.9, rows=100, stack="fsdp", half_width=0.1)
    plain, claimed = predict(case, dataclasses.replace(bold, pace=1.3)), predict(case, bold)
    assert (
        "of the card's peak" in claimed.support.words
        and "of the card's peak" not in plain.support.words
    )
    assert claimed.support.mfu > claimed.support.record > plain.support.mfu
    assert claimed.sec_hi / claimed.sec_per_it > 1.2 * plain.sec_hi / plain.sec_per_it
    newer = dataclasses.replace(
        case, cluster=cluster("h200")
    )  # no row of its own: what an H100 has reached
    assert (
        "of the card's peak"
        in predict(newer, dataclasses.replace(usual, pace=0.6, card="")).support.words
    )
    capped = [
        predict(case, dataclasses.replace(usual, matmul=share)).sec_per_it for share in (0.87, 0.95)
    ]
    assert capped[0] == capped[1]


LLAMA = dataclasses.replace(
    parse_shape("32,4096,32,4096,32000"),
    **{
        "num_key_value_heads": 8,
        "activation": "swiglu",
        "normalization": "rmsnorm",
        "positions": "rotary",
    },
    **{"biases": "qkv", "ffn_hidden_size": 14336, "tied_embeddings": False},
)
BLOOM = dataclasses.replace(
    parse_shape("24,2048,16,2048,250880"), positions="alibi", embedding_layernorm=True
)
CASES = {"shape": (LLAMA, BLOOM, parse_shape("32,2592,24,1024,50304"), SHAPE)}
CASES |= {
    "cluster": (
        "jz-a100-80g",
        "jz-v100-32g",
        "dgx-h100",
        "h200",
        "perlmutter-a100-40g",
        "jz-v100-16g",
    )
}
CASES |= {"engine": ("", "megatron", "deepspeed-zero", "deepspeed-3d", "hf-zero3")}
CASES |= {"stack": ("", "", "fsdp", "megatron-deepspeed", "megatron-core")}
TOPOLOGIES = {
    "tp": (1, 2, 4, 16),
    "pp": (1, 1, 2, 4),
    "dp": (1, 2, 8, 48),
    "mbs": (1, 2, 3),
    "gbs": (1152, 288),
}
TOPOLOGIES |= {
    "cp": (1, 1, 2),
    "zero": (0, 1, 2, 3),
    "recompute_layers": (0, 2),
    "interleaving": (1, 1, 2),
}
TOPOLOGIES |= {"first_stage_layers": (0, 0, 5), "last_stage_layers": (0, 0, 6), "shards": (0, 0, 8)}


def cases():
    """Every kind of plan that the formulas know, drawn: each value of a name alike likely."""
    usual = {
        name: CHOICES.get(name, (False, True))
        for name in vars(Topology())
        if name not in TOPOLOGIES
    }
    known = functools.cache(lambda name, stack: calibration_for(cluster(name), stack))
    for number in itertools.count():
        choice = random.Random(number).choice
        drawn = {name: choice(values) for name, values in {**CASES, **TOPOLOGIES, **usual}.items()}
        shape, machine, engine, stack = (drawn.pop(name) for name in CASES)
        with contextlib.suppress(ValueError):  # no such topology, or no such precision of the card
            topology = Topology(**drawn)
            if not invalid_reason(shape, topology) and cluster(machine).gpu.flops_per_s(
                topology.precision
            ):
                case = Configuration(
                    shape=shape, topology=topology, cluster=cluster(machine), engine=engine
                )
                yield f"{number} {engine} {stack}", case, known(machine, stack)


def test_predictions_of_all_kinds_of_plans_are_those_that_were_recorded():
    """Seconds and bytes by part, the nearest measured runs and what sets them apart."""
    found = {
        name: predict(case, known).to_json() for name, case, known in itertools.islice(cases(), 120)
    }
    for made in found.values():
        del made["support"]["words"]
    compare("predictions", found)
