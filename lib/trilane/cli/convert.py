"""`trilane convert`: plans as DeepSpeed's JSON or Megatron's arguments, and of those; checkpoints
for transformers.
"""

import json
import shlex
from pathlib import Path

from trilane.cli.app import GROUPS, Answer, Group, command, note
from trilane.cli.plan import PLAN, Choices
from trilane.config.options import option
from trilane.config.plan import plan_of, read_plan
from trilane.config.shapes import read_shape
from trilane.interop.deepspeed_config import deepspeed_config, read_deepspeed
from trilane.interop.megatron_args import megatron_args, megatron_text
from trilane.interop.megatron_parse import parse_plan
from trilane.interop.shell_args import read_launches, write_stubs
from trilane.launch.local import prepare_data
from trilane.utils.process import python, replace_by
from trilane.utils.validation import require
from trilane.workspace.study import load_cluster

convert = Group("convert", help=GROUPS["convert"])


@command(convert)
def deepspeed(
    plan: Path | None = PLAN,
    read: Path | None = option(None, "DeepSpeed's JSON; prints a plan", metavar="FILE"),
    shape: str = option("", "for --read: as of `plan show`"),
    cluster: str = option("", "for --read: the cluster's name or JSON file"),
    gpus: int = option(0, "for --read: GPUs of the run", minimum=1),
    engine: str = option("deepspeed-zero", "for --read: what trains it"),
    *,
    choices: Choices,
) -> Answer:
    """Print PLAN as DeepSpeed's JSON; or with --read the plan that such a JSON means, with what it
    lacks, such as --tp and --recompute, as options.

    What the plan cannot hold, "auto", and misspelt keys that DeepSpeed ignores go to stderr.
    """
    require(bool(plan) != bool(read), "plan", plan or "missing", "give a plan, or --read")
    if plan:
        given = read_plan(plan)
        require(given.engine != "megatron", "engine", given.engine, "takes no DeepSpeed JSON")
        return Answer(deepspeed_config(given, compiler=True))
    assert read
    chosen, optimizer, notes = read_deepspeed(read, gpus, choices)
    note(notes)
    found = plan_of(read_shape(shape), load_cluster(cluster), engine, chosen)
    return Answer(found.replace(optimizer=optimizer).to_json())


@command(convert)
def megatron(
    plan: Path | None = PLAN,
    prepare: bool = option(False, "prepare the corpus, and name its .bin/.idx pairs"),
    stubs: Path | None = option(
        None, "write stubs of launchers there, in which a script leaves its launches", metavar="DIR"
    ),
    read: Path | None = option(
        None, "its arguments, a log that has them, or such a DIR; prints a plan", metavar="FILE|DIR"
    ),
    cluster: str = option("", "for --read: the cluster's name or JSON file"),
    gpus: int = option(0, "for --read, where the arguments start no torchrun", minimum=1),
    vocab_size: int = option(
        0, "for --read, where the arguments name none; padded if tp asks for it", minimum=1
    ),
) -> Answer:
    """Print PLAN as Megatron-LM's arguments; or with --read the plan that those, or
    Megatron-DeepSpeed's, mean: of a script, one for each launch that --stubs have recorded.

    What the plan cannot hold goes to stderr.
    """
    is_one = [plan, read, stubs].count(None) == 2
    require(is_one, "plan", plan or "missing", "give a plan, or --read, or --stubs")
    if stubs:
        write_stubs(stubs)
        run = f"PATH={shlex.quote(str(stubs.absolute()))}:$PATH bash SCRIPT"
        return Answer({"run": run}, run)
    if plan:
        given = read_plan(plan)
        arguments = megatron_args(given, prepare_data(plan) if prepare else ())
        if given.topology.tp * given.topology.cp > 1:
            # its validate_args() of core 0.16.1 to 0.19.2, before Blackwell
            note(["it needs export CUDA_DEVICE_MAX_CONNECTIONS=1"])
        return Answer({"arguments": arguments}, megatron_text(arguments))
    assert read
    require(cluster, "cluster", "missing", "--read needs the cluster that the plan is for")
    machine = load_cluster(cluster)
    launches = read_launches(read)
    answers = []
    for name, words in launches.items():
        parsed = parse_plan(words, cluster=machine, label=name, gpus=gpus, vocab_size=vocab_size)
        note(f"{name}: {line}" if len(launches) > 1 else line for line in parsed.notes)
        values = {**vars(parsed), "plan": parsed.plan.to_json()}
        answers.append(values)
    if len(answers) == 1:
        return Answer(values, json.dumps(values["plan"], indent=1))
    plans = {"plans": [values.pop("plan") for values in answers]}
    return Answer({**plans, "launches": answers}, json.dumps(plans, indent=1))


@command(convert)
def huggingface(
    source: Path,
    out: Path,
    tokenizer: str = option(
        "", "a folder with a tokenizer.json, where it is not that of the training"
    ),
) -> None:
    """Write a checkpoint (of a run folder the newest), with its tokenizer, as a folder of Hugging
    Face's transformers.

    It is a GPT-2, BLOOM, Llama or Qwen 2, by the shape.
    """
    arguments = (str(source), str(out), tokenizer)
    replace_by(python("-m", "trilane_engine.checkpoint.huggingface", *arguments))


@command(convert)
def checkpoint(
    source: Path,
    out: Path,
    plan: str = option(
        "", "for a checkpoint of Megatron-LM: the plan that has its model, and goes on with it"
    ),
) -> None:
    """Write a checkpoint as one that Megatron-LM loads (torch_dist), or one of Megatron-LM as ours,
    for run.load.

    Of Megatron's the newest iteration, or a folder iter_*; weights, and Adam's moments where each
    stands whole.
    """
    replace_by(python("-m", "trilane_engine.checkpoint.torch_dist", str(source), str(out), plan))
