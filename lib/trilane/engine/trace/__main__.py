"""`python -m trilane.engine.trace PLAN`: trace a plan's engine without a GPU, write the trace beside it, print it."""

import json
import multiprocessing
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

from trilane.config.engines import require_trainable
from trilane.config.plan import Plan, read_plan
from trilane.costmodel.columns import columns_of
from trilane.costmodel.memory import in_flight, stage_layers
from trilane.costmodel.predict import predict
from trilane.costmodel.trace import Trace, TracedStage, timeline, trace_file, trace_text
from trilane.utils.files import replace_text
from trilane.utils.validation import print_refusal, require

MOST_GPUS = 16_384  # groups of all ranks are made on each: a minute for so many


def main(argv: list[str]) -> int:
    """Arguments `PLAN TIMELINE|"" [--json]`. 0, or 2 with one line where the plan cannot be traced."""
    path, lines, *options = argv
    try:
        plan = read_plan(path)
        require_traceable(plan)
        trace = traced(plan)
        replace_text(trace_file(plan, path), trace_text(trace))
        if lines:
            replace_text(Path(lines), json.dumps(timeline(trace, predict(plan).sec_per_it)) + "\n")
    except ValueError as error:
        print_refusal(error, "trilane: ")
        return 2
    print(json.dumps(trace.to_json(), indent=1) if options else text(plan, trace))
    return 0


def require_traceable(plan: Plan) -> None:
    """ValueError for what no trace can run, before anything is built or imported."""
    t = plan.topology
    require_trainable(t)
    rule = "its optimizer is compiled for the host, and its values move: a trace has tensors without values"
    require(t.offload == "none", "offload", t.offload, rule)
    require(t.gpus <= MOST_GPUS, "gpus", t.gpus, f"a trace is of at most {MOST_GPUS}")


def traced(plan: Plan, processes: int = 2) -> Trace:
    """The trace of a plan: the first and the last stage, and of those between one for each count of layers.

    Each is a process of its own, so that no state of the libraries is shared; the rest follows (derived()).
    """
    begin = time.monotonic()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # also where there are GPUs: see engine/trace/world.py
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as a training has it
    from trilane.engine.cpu import enable_cpu

    enable_cpu()
    import torch

    from trilane.engine.trace import rank, world

    torch.set_num_threads(1)
    world.prepare(plan)
    layers = stage_layers(plan.shape, plan.topology)
    kinds = [_kind(stage, layers) for stage in range(len(layers))]
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    with multiprocessing.get_context("fork").Pool(min(processes, len(chosen)), maxtasksperchild=1) as pool:
        found = dict(zip(chosen, pool.starmap(rank.trace_rank, [(plan, stage) for stage in chosen], 1), strict=True))
    stages = [
        found[stage][0] if stage in found else derived(plan, found[kinds.index(kinds[stage])][0], stage)
        for stage in range(len(layers))
    ]
    own = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = sorted(taken for _, taken in found.values())[-processes:]
    return Trace(
        plan=plan.id,
        engine=plan.engine,
        gpus=plan.topology.gpus,
        microbatches=plan.topology.microbatches,
        traced_microbatches=rank.traced_microbatches(plan)[1],
        seconds=time.monotonic() - begin,
        peak_rss_bytes=own + sum(taken),
        stages=tuple(stages),
    )


def _kind(stage: int, layers: list[int]) -> tuple[bool, bool, int]:
    return stage == 0, stage == len(layers) - 1, layers[stage]


def derived(plan: Plan, like: TracedStage, stage: int) -> TracedStage:
    """A stage as `like`, an earlier one of as many layers, with its own number of microbatches in flight."""
    x = columns_of(plan.shape, plan.topology, plan.engine)
    share = float(in_flight(x, stage) / in_flight(x, like.stage))
    less = like.activations_bytes * (1 - share)
    return replace(
        like,
        stage=stage,
        rank=stage * plan.topology.gpus // plan.topology.pp,
        derived=True,
        peak_bytes=like.peak_bytes - less,
        activations_bytes=like.activations_bytes - less,
        cpu_only_bytes=like.cpu_only_bytes * share,
        schedule=(),
    )


def text(plan: Plan, trace: Trace) -> str:
    """The trace for a person: a line a stage (GiB), its collectives, and whether kernels or their start take longer."""
    parts = ("peak", "weights", "gradients", "optimizer", "activations", "buffers", "temporary")
    rows = [[*("stage", "layers"), *parts, "kernels", "PFLOP", "peak at"]]
    for stage in trace.stages:
        held = [f"{getattr(stage, f'{part}_bytes') / 2**30:.2f}" for part in parts]
        number, when = f"{stage.stage}{'*' * stage.derived}", stage.peak_at
        rows.append([number, str(stage.layers), *held, f"{stage.operations:,}", f"{stage.flops / 1e15:.4g}", when])
    lines = _aligned(rows)
    if any(stage.derived for stage in trace.stages):
        lines.append("* derived from a stage of as many layers, by the microbatches in flight")
    rows = [["stage", "collective", "group", "count", "GB"]]
    for stage in (stage for stage in trace.stages if not stage.derived):
        for c in stage.collectives:
            rows.append([str(stage.stage), c.kind, c.group, f"{c.count:,}", f"{c.bytes / 1e9:.4g}"])
    most, seconds = max(stage.operations for stage in trace.stages), predict(plan).sec_per_it
    start = most * plan.cluster.launch_overhead_s
    bound = "the start of kernels decides" if start > seconds else "kernels decide"
    lines += ["", *_aligned(rows), ""]
    lines.append(f"{start:.3g} s to start the kernels of an iteration, predicted {seconds:.3g} s: {bound}")
    cost = f"{trace.seconds:.0f} s and {trace.peak_rss_bytes / 2**30:.1f} GiB"
    ran = f"{trace.traced_microbatches} of {trace.microbatches} microbatches"
    return "\n".join([f"{plan.label}: {plan.engine}, {trace.gpus} ranks, {ran} ran; traced in {cost}", *lines])


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
