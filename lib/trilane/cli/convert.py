"""`trilane convert`: plans as DeepSpeed's JSON, Megatron's arguments, Hugging Face's transformers, and back."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from trilane.cli.options import FILE, JSON, Choice, Group, command, emit, option, whole
from trilane.config.plan import plan_from_json, read_plan
from trilane.interop.megatron_args import ENGINE_OF, LM
from trilane.utils.process import python
from trilane.utils.tables import one_line
from trilane.utils.validation import read_json, read_text, require, to_mapping

convert = Group("convert", help="Convert plans and checkpoints to and from DeepSpeed, Megatron-LM and Hugging Face.")


@command(
    convert,
    click.argument("file", type=FILE),
    option("--plan", type=FILE, help="compare the DeepSpeed JSON with this plan"),
    option("--tp", type=whole(), help="tensor-parallel size, where no plan gives it"),
    option("--pp", type=whole(), help="pipeline stages, where no plan gives them"),
    option("--dp", type=whole(), help="replicas (default: what the batch sizes mean)"),
    JSON,
)
def deepspeed(file: Path, plan: Path | None, tp: int, pp: int, dp: int, as_json: bool) -> int:
    """Print DeepSpeed's JSON of a plan; or of FILE, a DeepSpeed JSON, its contradictions, then exit code 1."""
    from trilane.interop.deepspeed_config import contradictions, deepspeed_config, meant

    values = read_json(file, "file")
    require(isinstance(values, Mapping), "file", file, "must hold a JSON object")
    if "shape" in values and "topology" in values:
        given = plan_from_json(dict(values))
        require(plan is None, "plan", plan, f"{file} is a plan itself")
        require(given.engine != "megatron", "engine", given.engine, "takes no DeepSpeed JSON")
        return emit(True, deepspeed_config(given, compiler=True), "", indent=2)
    if plan:
        lines, topology = contradictions(values, read_plan(plan)), None
    else:
        lines, topology = meant(values, tp=tp or 1, pp=pp or 1, dp=dp or 0)
    keys = ("dp", "mbs", "gbs", "zero", "offload", "precision", "fp32_gradients")
    found = topology and to_mapping(topology)
    text = "\n".join(lines) or "no contradiction" + (": " + ", ".join(f"{n} {found[n]}" for n in keys) if found else "")
    return emit(as_json, {"contradictions": lines, "topology": found}, text, indent=2, failed=lines)


@command(
    convert,
    click.argument("plan", type=FILE, required=False),
    option("--flavour", type=Choice(tuple(ENGINE_OF)), default=LM, help="whose arguments"),
    option("--prepare", is_flag=True, help="prepare the corpus, and name its .bin/.idx pairs"),
    option("--read", type=FILE, metavar="FILE", help="a command line or part of a script; prints a plan"),
    option("--cluster", default="", help="for --read: the cluster's name or JSON file"),
    option("--gpus", type=whole(), help="for --read, where the text starts no torchrun"),
    option("--vocab-size", type=whole(), help="for --read, where the text names none; padded if tp asks for it"),
    JSON,
)
def megatron(
    plan: Path | None, read: Path | None, flavour: str, prepare: bool, cluster: str, as_json: bool, **sizes: Any
) -> None:
    """Print PLAN as Megatron-LM's or Megatron-DeepSpeed's arguments; or with --read the plan that arguments mean.

    What the plan cannot hold goes to stderr.
    """
    from trilane.interop.megatron_args import megatron_args, megatron_text
    from trilane.interop.megatron_parse import parse_plan
    from trilane.interop.shell_args import MOST_BYTES, read_arguments
    from trilane.launch.local import prepare_data
    from trilane.workspace.study import load_cluster

    require((plan is None) != (read is None), "plan", plan or "missing", "give either a plan, or --read FILE")
    if plan:
        arguments = megatron_args(read_plan(plan), flavour, prepare_data(plan) if prepare else ())
        emit(as_json, arguments, megatron_text(arguments))
        return
    assert read is not None
    require(bool(cluster), "cluster", "missing", "--read needs the cluster that the plan is for")
    arguments = read_arguments(read_text(read, "read", MOST_BYTES, "replace"))
    known = {name: value or 0 for name, value in sizes.items()}
    parsed = parse_plan(arguments, cluster=load_cluster(cluster), label=read.stem, **known)
    found = parsed.plan.to_json()
    left = {"ignored": parsed.ignored, "unknown": parsed.unknown, "differs": parsed.differs}
    emit(True, {"plan": found, **left} if as_json else found, "")
    for line in parsed.notes:
        print("trilane:", one_line(line), file=sys.stderr)


@command(
    convert,
    click.argument("source", type=FILE),
    click.argument("out", type=FILE),
    option("--back", is_flag=True, help="SOURCE is a folder of transformers, OUT a folder of checkpoints"),
    option("--seq", type=whole(), help="with --back: the sequence to train on (default: the longest of the model)"),
    option("--vocab-size", type=whole(), help="rows of the embedding in OUT: --back pads with zeros, else cuts"),
)
def huggingface(source: Path, out: Path, back: bool, seq: int | None, vocab_size: int | None) -> None:
    """Write a checkpoint (of a run folder the newest) as a folder of Hugging Face's transformers; with --back read one.

    It is a GPT-2, BLOOM, Llama or Qwen 2, by the shape; also a Mistral is read.
    """
    require(back or seq is None, "seq", seq, "goes with --back")
    given = ["import" if back else "export", str(source), str(out), str(seq or 0), str(vocab_size or 0)]
    os.execvp("env", python("-m", "trilane.engine.checkpoint.huggingface", *given))
