"""Thin doors for batch use: `python -m trilane DOOR ...`, listed by --help. Bad input is one line and exit code 2."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from trilane.checks import require


class Parser(argparse.ArgumentParser):
    """Arguments whose mistakes are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        """Say the mistake and leave with exit code 2."""
        self.exit(2, f"trilane: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one door; the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = Parser(prog="python -m trilane", description=__doc__)
    doors = parser.add_subparsers(dest="door", required=True)
    _add_run(doors.add_parser("run", help="execute one notebook of a study, or all in order"))
    _add_launch(doors.add_parser("launch", help="train a plan on this machine"))
    _add_bench(doors.add_parser("bench", help="measure this machine, or under torchrun or srun this cluster"))
    _add_planner(doors)
    args = parser.parse_args(argv)
    try:
        return args.call(args)
    except ValueError as error:
        print(f"trilane: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trilane: interrupted; what was written so far stays readable", file=sys.stderr)
        return 130


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebook", help="a notebook's name, such as 02_topology, or all")
    parser.add_argument("--study", default="demo", help="the folder below outputs/ (default: demo)")
    parser.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"))
    parser.add_argument("--resume", action="store_true", help="go on in a study that exists")
    parser.add_argument("--fresh", action="store_true", help="take the next free name if the study exists")
    parser.set_defaults(call=_run)


def _run(args: argparse.Namespace) -> int:
    from trilane import notebook
    from trilane.store import Study

    require(not (args.resume and args.fresh), "resume", True, "contradicts --fresh")
    given = dict(args.parameter)
    chosen = notebook.DEMO if args.notebook == "all" else (args.notebook,)
    notebook.distribute(chosen, given)  # every parameter is checked before a folder is made
    # one notebook may join a study that does not hold it yet: 02 after 01
    joins = args.notebook != "all" and not (Study(args.study).folder / f"{args.notebook}.ipynb").exists()
    study = Study.create(args.study, resume=args.resume or joins, fresh=args.fresh)
    try:
        if args.notebook == "all":
            report = notebook.run_all(study, given)
        else:
            report = notebook.run(args.notebook, study, **given)
    except notebook.NotebookError as error:
        print(f"trilane: {error}", file=sys.stderr)
        print(f"the executed copy with the traceback: {study.folder / error.notebook}.ipynb", file=sys.stderr)
        return 2 if error.is_input else 1
    print(report)
    return 0


def _add_launch(parser: argparse.ArgumentParser) -> None:
    from trilane import launch

    launch.add_arguments(parser)
    parser.set_defaults(call=launch.run)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", nargs="?", default="", metavar="OUT.json", help="default: NAME.json")
    parser.add_argument("--name", default="", help="default: the host's name without digits, or local on one machine")
    parser.set_defaults(call=_bench)


def _bench(args: argparse.Namespace) -> int:
    # In place of this process: torchrun and srun count on the rank that they started. Only the engine imports torch.
    engine = [sys.executable, "-m", "trilane.engine.bench", *filter(None, [args.out]), "--name", args.name]
    os.execv(sys.executable, engine)


def _add_planner(doors: "argparse._SubParsersAction[Parser]") -> None:
    from trilane import (
        backtest,
        benchmark,
        bisect,
        calendar_door,
        capture_door,
        compare_door,
        ds_config_door,
        hang_door,
        lint,
        megatron_door,
        parse_door,
        rehearse,
        restart_door,
        search_door,
        seedtable,
        size_door,
        spikes_door,
        trace_door,
        verify,
    )

    for name, room, text in (
        ("size", size_door, "shapes of a target size: layers x hidden, topology, days and GPU-hours"),
        ("search", search_door, "rank every topology of a cluster for a model"),
        ("benchmark", benchmark, "train a plan for some iterations and say how fast they were, as one JSON object"),
        (
            "calendar",
            calendar_door,
            "a plan, its tokens and a ramp: finish date, GPU-hours, and the risk of missing them",
        ),
        ("megatron-args", megatron_door, "a plan as Megatron-LM's or Megatron-DeepSpeed's arguments, and back"),
        ("backtest", backtest, "measured rows against predictions"),
        ("ds-config", ds_config_door, "DeepSpeed's JSON of a plan, or the contradictions in one of yours"),
        ("verify", verify, "train the equality table of the engines on this machine"),
        ("parse", parse_door, "what logs in any dialect say: speed, memory, loss, and how the run ended"),
        ("spikes", spikes_door, "where the loss or the gradient norm left its course, over restarts"),
        ("compare", compare_door, "whether the runs of B are faster than those of A"),
        ("lint", lint, "what contradicts itself in a hand-written table"),
        ("table", seedtable, "the runs of a folder as one table"),
        ("hang", hang_door, "who is to blame for a hang: the stacks of all ranks, merged and judged"),
        ("capture", capture_door, "take the stacks of a running job, and judge them"),
        ("bisect", bisect, "shrink a plan that hangs until the boundary to what works is known"),
        ("restart", restart_door, "what was saved against what a restart made of it, by rank and tensor"),
        ("rehearse", rehearse, "train, save, load and compare a plan's topology at tiny width"),
        ("trace-tail", trace_door, "the last call of each rank, from trace files of any size"),
    ):
        parser = doors.add_parser(name, help=text)
        room.add_arguments(parser)
        parser.set_defaults(call=room.run)


if __name__ == "__main__":
    sys.exit(main())
