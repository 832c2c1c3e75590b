"""`python -m trilane_engine.trace PLAN`: trace a plan's engine without a GPU, write the trace
beside it, print it.
"""

import json
import os
import sys
from pathlib import Path

from trilane.config.engines import require_trainable
from trilane.config.plan import Plan, read_plan
from trilane.costmodel.expected import compare
from trilane.costmodel.memory import stage_layers
from trilane.costmodel.predict import predict
from trilane.costmodel.trace import Trace, timeline, trace_file, trace_text
from trilane.utils.files import replace_text
from trilane.utils.process import context
from trilane.utils.validation import print_refusal, require

MOST_GPUS = 16_384  # groups of all ranks are made on each: a minute for so many


def main(argv: list[str]) -> int:
    """Arguments `PLAN TIMELINE|"" [--json]`. 0, or 2 with one line where nothing can be traced or
    written.
    """
    path, lines, *options = argv
    try:
        plan = read_plan(path)
        require_traceable(plan)
        file = trace_file(plan, path)
        require(
            os.access(file.parent, os.W_OK),
            "plan",
            path,
            "its folder cannot be written, where the trace is kept",
        )
        trace = traced(plan)
        print(json.dumps(trace.to_json(), indent=1) if options else text(plan, trace), flush=True)
        replace_text(file, trace_text(trace))
        if lines:
            replace_text(Path(lines), json.dumps(timeline(trace, predict(plan).sec_per_it)) + "\n")
        return 0
    except ValueError as error:
        print_refusal(error, "trilane: ")
    except OSError as error:
        print_refusal(
            ValueError(f"file={error.filename}: cannot be written ({error.strerror})"), "trilane: "
        )
    return 2


def require_traceable(plan: Plan) -> None:
    """ValueError for what no trace can run, before anything is built or imported."""
    t = plan.topology
    require_trainable(t)
    rule = "its optimizer is compiled for the host, and its values move: a trace has tensors without values"
    require(t.offload == "none", "offload", t.offload, rule)
    require(t.gpus <= MOST_GPUS, "gpus", t.gpus, f"a trace is of at most {MOST_GPUS}")


def traced(plan: Plan, processes: int = 2) -> Trace:
    """The trace of a plan: the first and the last stage, and of those between the first of each
    count of layers.

    Each is a process of its own, so that no state of the libraries is shared. The stages that
    follow one of as many layers have fewer microbatches in flight.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        "-1"  # also where there are GPUs: see engine/trace/world.py
    )
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as a training has it
    from trilane_engine.cpu import enable_cpu

    enable_cpu()
    import torch

    from trilane_engine.trace import rank, world

    torch.set_num_threads(1)
    world.prepare(plan)
    layers, last = stage_layers(plan.shape, plan.topology), plan.topology.pp - 1
    kinds = [(stage == 0, stage == last, count) for stage, count in enumerate(layers)]
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    with context("fork").Pool(min(processes, len(chosen)), maxtasksperchild=1) as pool:
        stages = pool.starmap(rank.trace_rank, [(plan, stage) for stage in chosen], 1)
    return Trace(
        plan=plan.id,
        engine=plan.engine,
        gpus=plan.topology.gpus,
        microbatches=plan.topology.microbatches,
        traced_microbatches=rank.traced_microbatches(plan)[1],
        stages=tuple(stages),
    )


def text(plan: Plan, trace: Trace) -> str:
    """The trace for a person: a line a stage (GiB), and what is predicted of it."""
    parts = ("peak", "weights", "gradients", "optimizer", "activations", "buffers", "temporary")
    rows = [["stage", "layers", *parts, "kernels", "PFLOP", "peak at"]]
    for s in trace.stages:
        held = [f"{getattr(s, f'{part}_bytes') / 2**30:.2f}" for part in parts]
        rows.append(
            [
                str(s.stage),
                str(s.layers),
                *held,
                f"{s.operations:,}",
                f"{s.flops / 1e15:.4g}",
                s.peak_at,
            ]
        )
    lines = [*_aligned(rows), "", *_aligned(_compared(plan, trace))]
    ran = f"{trace.traced_microbatches} of {trace.microbatches} microbatches"
    return "\n".join([f"{plan.label}: {plan.engine}, {trace.gpus} ranks, {ran} ran", *lines])


def _compared(plan: Plan, trace: Trace) -> list[list[str]]:
    """Rows of what was traced, beside what the formulas expect."""
    rows = [["stage", "in an iteration", "traced", "predicted", "difference"]]
    units = {
        "flops": (1e15, "PFLOP"),
        "bytes": (1e9, "GB"),
        "count": (1.0, ""),
        "in flight": (1.0, "microbatches"),
    }
    for d in compare(plan, trace):
        kind = d.quantity if d.quantity in units else d.quantity.rpartition(" ")[2]
        unit, word = units.get(kind, (2**30, "GiB"))
        cells = [f"{d.traced / unit:.4g}", f"{d.predicted / unit:.4g}", f"{d.difference:+.1%}"]
        known = ["-" if "nan" in cell else cell for cell in cells]
        rows.append([str(d.stage), f"{d.quantity}, {word}".rstrip(", "), *known])
    return rows


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
