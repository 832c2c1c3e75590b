"""Thin doors for batch use: `python -m trilane DOOR ...`, listed by --help. Bad input is one line and exit code 2."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from trilane.utils.validation import require, require_known

# Each door's name, the room that holds it (with the words after its functions' `add_` and `run_` where it holds
# several), and what it is for. Only the room of the door that is asked for is imported.
DOORS = (
    ("run", "cli.run", "execute one notebook of a study, or all in order"),
    ("size", "cli.size", "shapes of a target size: layers x hidden, topology, days and GPU-hours"),
    ("search", "cli.search", "rank every topology of a cluster for a model"),
    ("calendar", "cli.calendar", "a plan, its tokens and a ramp: finish date, GPU-hours, the risk of missing them"),
    ("backtest", "costmodel.backtest", "measured rows against predictions"),
    ("bench", "cli.bench", "measure this machine, or under torchrun or srun this cluster"),
    ("launch", "launch.local", "train a plan on this machine"),
    (
        "benchmark",
        "experiments.benchmark",
        "train a plan for some iterations and say how fast they were, as one JSON object",
    ),
    ("verify", "experiments.parity", "train the equality table of the engines on this machine"),
    ("ds-config", "cli.ds_config", "DeepSpeed's JSON of a plan, or the contradictions in one of yours"),
    ("megatron-args", "cli.megatron", "a plan as Megatron-LM's or Megatron-DeepSpeed's arguments, and back"),
    ("guard", "slurm.preflight.check", "what must be refused before GPUs are spent"),
    ("script", "cli.slurm_jobs:script", "the sbatch script of a plan, to read or edit"),
    ("submit", "cli.slurm_jobs:submit", "submit runs to SLURM, or train them here at site local"),
    ("resubmit", "cli.slurm_jobs:submit", "submit again what has not completed"),
    ("status", "cli.slurm_jobs:status", "every job of a study in one call: queue, progress, verdict"),
    ("tail", "cli.slurm_jobs:tail", "the last lines of a run's log"),
    ("cancel", "cli.slurm_jobs:cancel", "cancel the jobs of runs"),
    ("sweep", "cli.slurm_sweep", "a table of plans as one job array"),
    ("chain", "cli.slurm_chain", "a long run as dependent jobs"),
    ("attach", "cli.slurm_monitor:attach", "look into a running job: memory, stacks, processes"),
    ("watch", "cli.slurm_monitor:watch", "say when a run dies, stalls or goes on"),
    ("job", "cli.slurm_jobs:job", "for the job scripts: may this attempt begin, how did it end"),
    ("parse", "cli.parse", "what logs in any dialect say: speed, memory, loss, and how the run ended"),
    ("table", "analysis.tables", "the runs of a folder as one table"),
    ("lint", "documents.lint.lint", "what contradicts itself in a hand-written table"),
    ("compare", "cli.compare", "whether the runs of B are faster than those of A"),
    ("spikes", "cli.spikes", "where the loss or the gradient norm left its course, over restarts"),
    ("hang", "cli.hang", "who is to blame for a hang: the stacks of all ranks, merged and judged"),
    ("capture", "cli.capture", "take the stacks of a running job, and judge them"),
    ("stragglers", "cli.stragglers", "which rank, node or link makes the others wait, from phase times"),
    ("trace-tail", "cli.trace", "the last call of each rank, from trace files of any size"),
    ("restart", "cli.restart", "what was saved against what a restart made of it, by rank and tensor"),
    ("rehearse", "experiments.rehearse", "train, save, load and compare a plan's topology at tiny width"),
    ("bisect", "experiments.bisect", "shrink a plan that hangs until the boundary to what works is known"),
)


class Parser(argparse.ArgumentParser):
    """Arguments whose mistakes are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        """Say the mistake and leave with exit code 2."""
        self.exit(2, f"trilane: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one door; the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted, 141 nobody reads what it prints."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog="python -m trilane", description="What the notebooks do, from a shell. `DOOR --help` says more."
    )
    doors = parser.add_subparsers(dest="door", required=True, metavar="DOOR")
    for name, place, text in DOORS:
        door = doors.add_parser(name, help=text)
        if name in words[:1]:
            _furnish(door, *place.partition(":")[::2])
    if not words:
        parser.print_help(sys.stderr)
        return 2
    try:
        if not words[0].startswith("-"):
            require_known("door", words[0], [name for name, *_ in DOORS])
        args, unknown = parser.parse_known_args(words)
        for word in unknown:
            require(word.startswith("-"), "argument", word, "is one too many")
            require_known("option", word.partition("=")[0], sorted(_options(doors.choices[words[0]])))
            require(False, "option", word, "does not stand where it can be understood")
        code: int = args.call(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains on its way out
        return 141
    except ValueError as error:
        print(f"trilane: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trilane: interrupted; what was written so far stays readable", file=sys.stderr)
        return 130


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """Every option of a door and of the doors inside it."""
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    own = {name for name in parser._option_string_actions if name.startswith("--")}
    return own.union(*(_options(door) for action in inner for door in action.choices.values()))


def _furnish(door: argparse.ArgumentParser, room: str, part: str) -> None:
    """The door's arguments, and what it calls, from its room."""
    place = importlib.import_module(f"trilane.{room}")
    if part:
        getattr(place, f"add_{part}")(door)
    else:
        place.add_arguments(door)
        door.set_defaults(call=place.run)
