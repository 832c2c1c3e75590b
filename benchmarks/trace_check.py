"""What the engines really hold and compute beside the formulas: python
benchmarks/trace_check.py

Draws plans by a fixed seed, over engines, shapes (GPT-2, BLOOM, Llama), TP, PP, interleaving,
sequence parallelism, ZeRO and recomputation; traces each (engine/trace) and compares every number
of every traced stage. Exit code 1 where one is further off than LIMITS.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import random
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from trilane.config.cluster import cluster
from trilane.config.engines import (
    ENGINES,
    default_attention,
    default_fp32_gradients,
    has_bf16_optimizer,
    unsupported_reason,
)
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology, invalid_reason
from trilane.config.plan import Plan
from trilane.config.training import Dropout
from trilane.costmodel.columns import SELECTIVE, Columns, Number, columns_of
from trilane.costmodel.memory import (
    MemoryConstants,
    end_bytes,
    engine_memory,
    in_flight,
    kept_bytes,
    layer_kinds,
    model_states,
    over_layers,
)
from trilane.costmodel.trace import Trace, TracedStage

LIMITS = {"flops": 0.001}  # of other quantities:
MEMORY = 0.02
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "bloom": {"positions": "alibi", "embedding_layernorm": True, "activation": "gelu-tanh"},
    "llama": {
        "positions": "rotary",
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "biases": "none",
    },
}
FAMILIES["llama"] |= {"tied_embeddings": False, "num_key_value_heads": 8}
FAMILIES["mixtral"] = FAMILIES["llama"] | {"experts": 8, "top_k": 2, "expert_ffn": 1024}


def limit(quantity: str) -> float:
    """The share by which a prediction of this quantity may differ."""
    return LIMITS.get(quantity, MEMORY)


def difference(traced: float, predicted: float) -> float:
    """(predicted - traced) / traced; infinite where one of the two is 0, NaN where nothing is
    predicted.
    """
    if traced == predicted:
        return 0.0
    if not traced or not predicted:
        return float("inf")
    return predicted / traced - 1


def drawn(count: int, seed: int, engine: str = "") -> Iterator[Plan]:
    """Plans that an engine can train, of as few layers as their stages need."""
    pick = random.Random(seed).choice
    found = 0
    while found < count:
        name = engine or pick((*ENGINES, "megatron", "megatron", "deepspeed-3d"))
        if plan := _draw(pick, name, f"{found:02d}"):
            found += 1
            yield plan


def _draw(pick: Any, engine: str, label: str) -> Plan | None:
    family, piped = pick([*FAMILIES]), engine in ("megatron", "deepspeed-3d")
    pp = pick((1, 2, 4)) if piped else 1
    chunks = pick((1, 1, 2)) if pp > 1 and engine == "megatron" else 1
    layers = pp * chunks * pick((1, 2))
    sizes = {
        "hidden_size": pick((1024, 2048)),
        "num_attention_heads": 16,
        "seq_length": pick((1024, 2048)),
    }
    shape = ModelShape(
        num_layers=layers, vocab_size=pick((32768, 51200)), **sizes, **FAMILIES[family]
    )
    card = cluster(pick(("jz-a100-80g", "jz-a100-80g", "jz-v100-32g")))
    precision = "fp16" if card.name.startswith("jz-v100") else "bf16"
    tp = pick((1, 2, 4, 8)) if engine != "hf-zero3" else 1
    recompute = pick(("none", "none", "selective", "full", "block"))
    mbs, dp = pick((1, 2)), pick((1, 2, 8))
    try:
        topology = Topology(
            tp=tp,
            pp=pp,
            dp=dp,
            mbs=mbs,
            gbs=mbs * dp * pp * 4,
            zero=pick((0, 1))
            if engine == "megatron"
            else 1
            if engine == "deepspeed-3d"
            else pick((1, 2, 3)),
            interleaving=chunks,
            sequence_parallel=tp > 1 and pick((True, False)),
            recompute=recompute,
            recompute_layers=int(recompute == "block"),
            ep=2 if shape.experts and tp * dp > 1 else 1,
            precision=precision,
            attention=default_attention(shape, card, precision),
            fp32_gradients=default_fp32_gradients(precision),
        )
        dropout = Dropout(hidden=pick((0.0, 0.0, 0.1)) if engine != "hf-zero3" else 0.0)
        refused = invalid_reason(shape, topology) or unsupported_reason(engine, shape, topology)
        plan = Plan(
            label=f"{label}-{family}",
            shape=shape,
            cluster=card,
            topology=topology,
            engine=engine,
            dropout=dropout,
        )
    except ValueError:
        return None
    return None if refused else plan


def check(plan: Plan) -> list[dict[str, Any]] | str:
    """The comparison of one plan, traced in a process of its own; text where it cannot
    be traced.
    """
    receive, send = multiprocessing.Pipe(duplex=False)
    # forked from a process that computes nothing: torch's autograd aborted in a fork of one that
    # had
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trilane_engine.trace.__main__", "torch"])
    process = context.Process(target=_traced, args=(plan, send))
    process.start()
    send.close()
    try:
        found: list[dict[str, Any]] | str = receive.recv()
    except EOFError:
        found = "its process ended"
    process.join()
    return found


def _traced(plan: Plan, send: Connection) -> None:
    from trilane_engine.trace.__main__ import require_traceable, traced

    try:
        require_traceable(plan)
        send.send(compare(plan, traced(plan)))
    except Exception as error:
        send.send(f"{type(error).__name__}: {error}")


def compare(plan: Plan, trace: Trace) -> list[dict[str, Any]]:
    """Each number of the stages that were traced beside its prediction, as `stage`, `quantity`,
    `traced` and `predicted`: `compare(plan, trace)`.

    Bytes of a kind of memory (activations: of one microbatch, and how many are in flight), FLOPs,
    and count and bytes of the collectives of each kind and group, whose prediction is NaN, unknown.
    """
    differences = []
    for stage in trace.stages:
        predicted = expected(plan, stage.stage)
        for quantity, number in traced_numbers(stage).items():
            row = {"stage": stage.stage, "quantity": quantity, "traced": number}
            row["predicted"] = predicted.get(quantity, np.nan)
            differences.append(row)
    return differences


def traced_numbers(stage: TracedStage) -> dict[str, float]:
    """The numbers of a traced stage by quantity: those of expected(), then "all-reduce tp count",
    "... bytes".
    """
    held = [{"forward": 1, "backward": -1}.get(step.kind, 0) for step in stage.schedule]
    most_held = max(itertools.accumulate(held, initial=0))
    chunks = max(len({step.chunk for step in stage.schedule}), 1)
    numbers = {
        "weights": stage.weights_bytes,
        "gradients": stage.gradients_bytes,
        "optimizer": stage.optimizer_bytes,
        "activations": stage.activations_each_bytes,
        "flops": stage.flops,
        "in flight": most_held / chunks,
    }
    for c in stage.collectives:
        numbers[f"{c.kind} {c.group} count"] = c.count
        numbers[f"{c.kind} {c.group} bytes"] = c.bytes
    return numbers


def expected(plan: Plan, stage: int) -> dict[str, float]:
    """The numbers of compare() by quantity: "weights", ... in bytes, "flops"."""
    x = columns_of(plan.shape, plan.topology, plan.engine)
    constants = engine_memory(plan.engine, plan.cluster, plan.dropout, plan.topology.zero)
    weights, gradients, optimizer = model_states(x.changed(adam=0), stage, constants)
    if plan.engine != "megatron" and not has_bf16_optimizer(plan.topology):
        gradients = np.nan
    numbers = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": microbatch_bytes(x, stage, constants),
        "in flight": in_flight(x, stage),
        "flops": stage_flops(x, stage, constants),
    }
    return {name: float(value) for name, value in numbers.items()}


def microbatch_bytes(x: Columns, stage: int, constants: MemoryConstants) -> Number:
    """Activations of one microbatch when its backward pass begins; on the last stage with its
    logits.

    The compiled loss keeps them in their own precision, any other an fp32 softmax
    (engine/model/fused.py).
    """
    each = x.value_bytes
    if constants.gates or constants.unfused:
        each = 4 + constants.handed * x.value_bytes
    logits = (stage == x.pp - 1) * x.tokens * x.vocab / x.tp * each
    layers = kept_bytes(x, stage, constants)
    # int64; of a part of the vocabulary a copy and a mask, too
    ids = (stage == 0) * x.tokens * (8 + 9 * (x.tp > 1))
    return layers + end_bytes(x, stage, constants) + logits + ids


def stage_flops(x: Columns, stage: int, constants: MemoryConstants) -> Number:
    """FLOPs of a stage: ModelShape.flops_per_iteration() of its part of layers and head, and what
    is computed again.

    transformers' layers end their recomputation with the last input that is kept: without the MLP's
    second product.
    """
    layers = over_layers(x, stage, layer_kinds(x, lambda x: layer_flops(x, constants)))
    head = (stage == x.pp - 1) * 6 * x.tokens * x.embedding_parameters
    return x.microbatches * (layers + head)


def layer_flops(x: Columns, constants: MemoryConstants) -> Number:
    """FLOPs of one layer and microbatch; of experts each copy of a token goes through one, which
    etp ranks share, and the router sees the tokens of a rank.
    """
    linear = 2 * x.tokens * x.layer_weights
    expert = x.etp * sum(outputs * inputs for outputs, inputs in x.expert_matrices)
    routed = x.tokens / x.tp * x.hidden * (x.experts + x.shared_gate)
    linear += 2 * (x.experts > 0) * (x.copies * expert + routed)
    core = 4 * x.tokens * x.seq * x.query_hidden / x.tp
    if x.cp > 1:
        core *= (2 * x.cp + 1) / (4 * x.cp)  # keys of two chunks up to their ends
    left = constants.unfused * 2 * x.tokens * x.hidden * x.ffn / x.tp
    again = x.recomputed * (linear - left + core) + (x.recompute == SELECTIVE) * core
    return 3 * (linear + core) + again


def main() -> int:
    """Print each plan, its differences beyond the limits, and the largest of each quantity by
    engine.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--engine", choices=ENGINES, default="")
    parser.add_argument("--json", metavar="FILE", default="")
    args = parser.parse_args()
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    rows, failed = list[dict[str, Any]](), 0
    for plan in drawn(args.plans, args.seed, args.engine):
        found, case = check(plan), f"{plan.label}-{plan.topology.label} {plan.cluster.gpu.name}"
        if isinstance(found, str):
            print(f"{plan.engine:15}{case}: {found}", flush=True)
            failed += 1
            continue
        for d in found:
            d["difference"] = difference(d["traced"], d["predicted"])
        far = [d for d in found if abs(d["difference"]) > limit(d["quantity"])]
        failed += bool(far)
        print(f"{plan.engine:15}{case}: {len(found)} numbers, {len(far)} too far", flush=True)
        for d in far:
            print(
                "  stage {stage} {quantity}: {traced:.6g} traced, {predicted:.6g} ({difference:+.2%})".format(
                    **d
                )
            )
        for d in found:
            if not math.isnan(d["difference"]):  # it is predicted
                kind = plan.engine, d["quantity"]
                worst[kind] = max(worst.get(kind, (0.0, case)), (abs(d["difference"]), case))
            rows.append({"plan": case, "engine": plan.engine, **d})
    print(f"\n{'largest difference':35}")
    for (engine, kind), (share, case) in sorted(worst.items()):
        print(f"{engine:15}{kind:20}{share:8.2%}  {case}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
