"""`python -m trilane_engine.trace PLAN`: trace a plan's engine without a GPU, write the trace
beside it, print it.
"""

import os
import sys
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor

from pandas import DataFrame

from trilane.config.engines import require_trainable
from trilane.config.plan import Plan, read_plan
from trilane.costmodel.columns import columns_of
from trilane.costmodel.memory import stage_layers_at
from trilane.costmodel.trace import Trace, trace_file, trace_text
from trilane.utils.files import replace_text
from trilane.utils.process import context
from trilane.utils.validation import print_refusal, require


def main(argv: list[str]) -> int:
    """Arguments `PLAN [--json]`. 0, or 2 with one line where nothing can be traced or written."""
    path, *options = argv
    try:
        plan = read_plan(path)
        require_traceable(plan)
        file = trace_file(plan, path)
        trace = traced(plan)
        print(trace_text(trace).rstrip() if options else text(trace), flush=True)
        replace_text(file, trace_text(trace))
        return 0
    except ValueError as error:
        print_refusal(error, "trilane: ")
    except BrokenExecutor:
        print_refusal(ValueError(f"plan={path}: a process of its trace was killed"), "trilane: ")
    except OSError as error:
        why = f"file={error.filename}: cannot be written ({error.strerror})"
        print_refusal(ValueError(why), "trilane: ")
    return 2


def require_traceable(plan: Plan) -> None:
    """ValueError for what no trace can run, before anything is built or imported."""
    t = plan.topology
    require_trainable(plan)
    rule = "its optimizer is compiled for the host, and its values move: a trace has no values"
    require(t.offload == "none", "offload", t.offload, rule)
    shape = plan.shape
    copies = t.mbs * shape.seq_length * shape.top_k // (t.cp * t.tp)
    rule = f"{copies} copies of tokens are not the same number for each expert"
    require(not shape.experts or copies % shape.experts == 0, "experts", shape.experts, rule)


def traced(plan: Plan) -> Trace:
    """The trace of a plan: the first and the last stage, and of those between the first of each
    count of layers.

    Each is a process of its own, so that no state of the libraries is shared. The stages that
    follow one of as many layers have fewer microbatches in flight.
    """
    # also where there are GPUs: see engine/trace/world.py
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as a training has it
    from trilane_engine.cpu import enable_cpu

    enable_cpu()
    import torch

    from trilane_engine.trace import rank, world

    torch.set_num_threads(1)
    world.prepare(plan)
    last = plan.topology.pp - 1
    first_of: dict[tuple[bool, bool, int], int] = {}
    columns = columns_of(plan.shape, plan.topology)
    for stage in range(plan.topology.pp):
        layers = int(stage_layers_at(columns, stage))
        first_of.setdefault((stage == 0, stage == last, layers), stage)
    chosen = list(first_of.values())
    layers_of = [layers for _, _, layers in first_of]
    # as many workers as stages: each takes one; the first that dies ends all with an error
    with ProcessPoolExecutor(len(chosen), context("fork")) as pool:
        stages = pool.map(rank.trace_rank, [plan] * len(chosen), chosen, layers_of)
    return Trace(
        plan=plan.id,
        engine=plan.engine,
        gpus=plan.topology.gpus,
        microbatches=plan.topology.microbatches,
        traced_microbatches=rank.traced_microbatches(plan)[1],
        stages=tuple(stages),
    )


def text(trace: Trace) -> str:
    """The trace for a person: a line a stage, in bytes and FLOPs, and what each sends."""
    stages = DataFrame([stage.to_json() for stage in trace.stages])
    stages = stages.drop(columns=["rank", "collectives", "schedule"])
    sent: list[dict[str, object]] = []
    for stage in trace.stages:
        sent += [{"stage": stage.stage, **one.to_json()} for one in stage.collectives]
    return f"{stages.to_string(index=False)}\n\n{DataFrame(sent).to_string(index=False)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
