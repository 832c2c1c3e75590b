"""`trilane convert`: plans as DeepSpeed's JSON or Megatron's arguments, and of those; checkpoints
for transformers.
"""

from pathlib import Path

from trilane.cli.app import Answer, Group, command, note
from trilane.config.options import option
from trilane.config.plan import read_plan
from trilane.interop.deepspeed_config import deepspeed_config
from trilane.interop.megatron_args import megatron_args, megatron_environment, megatron_text
from trilane.interop.megatron_parse import parse_plan
from trilane.interop.shell_args import MOST_BYTES, read_arguments
from trilane.launch.local import prepare_data
from trilane.utils.process import python, replace_by
from trilane.utils.validation import read_text, require
from trilane.workspace.study import load_cluster

GROUP = Group(
    "convert",
    help="Convert plans to and from DeepSpeed and Megatron-LM, and checkpoints to Hugging Face.",
)


@command(GROUP)
def deepspeed(plan: Path) -> Answer:
    """Print PLAN as DeepSpeed's JSON; `diff` of it and your own shows misspelt keys, too, which
    DeepSpeed ignores.
    """
    given = read_plan(str(plan))
    require(given.engine != "megatron", "engine", given.engine, "takes no DeepSpeed JSON")
    return Answer(deepspeed_config(given, compiler=True))


@command(GROUP)
def megatron(
    plan: Path | None = option(None, argument="[PLAN]"),
    prepare: bool = option(False, "prepare the corpus, and name its .bin/.idx pairs"),
    read: Path | None = option(
        None, "a command line or part of a script; prints a plan", metavar="FILE"
    ),
    cluster: str = option("", "for --read: the cluster's name or JSON file"),
    gpus: int = option(0, "for --read, where the text starts no torchrun", minimum=1),
    vocab_size: int = option(
        0, "for --read, where the text names none; padded if tp asks for it", minimum=1
    ),
    as_json: bool = False,
) -> Answer:
    """Print PLAN as Megatron-LM's arguments; or with --read the plan that those, or
    Megatron-DeepSpeed's, mean.

    What the plan cannot hold goes to stderr.
    """
    require(
        (plan is None) != (read is None),
        "plan",
        plan or "missing",
        "give either a plan, or --read FILE",
    )
    if read is None:
        given = read_plan(str(plan))
        arguments = megatron_args(given, prepare_data(Path(str(plan))) if prepare else ())
        environment = megatron_environment(given)
        both = {"environment": environment, "arguments": arguments}
        return Answer(both, megatron_text(arguments, environment))
    require(bool(cluster), "cluster", "missing", "--read needs the cluster that the plan is for")
    words = read_arguments(read_text(read, "read", MOST_BYTES, "replace"))
    parsed = parse_plan(
        words, cluster=load_cluster(cluster), label=read.stem, gpus=gpus, vocab_size=vocab_size
    )
    note(parsed.notes)
    found = parsed.plan.to_json()
    left = {"ignored": parsed.ignored, "unknown": parsed.unknown, "differs": parsed.differs}
    return Answer({"plan": found, **left} if as_json else found)


@command(GROUP)
def huggingface(
    source: Path,
    out: Path,
    vocab_size: int = option(
        0, "rows of the embedding in OUT: without those of padding", minimum=1
    ),
    tokenizer: str = option(
        "", "bytes, or a folder with a tokenizer.json, where it is not that of the training"
    ),
) -> None:
    """Write a checkpoint (of a run folder the newest), with its tokenizer, as a folder of Hugging
    Face's transformers.

    It is a GPT-2, BLOOM, Llama or Qwen 2, by the shape.
    """
    given = [str(source), str(out), str(vocab_size), tokenizer]
    replace_by(python("-m", "trilane_engine.checkpoint.huggingface", *given))


@command(GROUP)
def checkpoint(
    source: Path,
    out: Path,
    plan: str = option(
        "", "for a checkpoint of Megatron-LM: the plan that has its model, and goes on with it"
    ),
    iteration: int = option(
        -1, "for a checkpoint of Megatron-LM: the iteration after which it counts", minimum=-1
    ),
) -> None:
    """Write a checkpoint as one that Megatron-LM loads (torch_dist), or one of Megatron-LM as ours,
    for run.load.

    Of Megatron's the newest iteration, or a folder iter_*; weights, and Adam's moments where each
    stands whole.
    """
    replace_by(
        python(
            "-m",
            "trilane_engine.checkpoint.torch_dist",
            str(source),
            str(out),
            plan,
            str(iteration),
        )
    )
