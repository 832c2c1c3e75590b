"""The door `run`: one notebook of a study, or all in order."""

import argparse
import sys

from trilane.report import notebook
from trilane.utils.validation import require
from trilane.workspace.study import Study


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments."""
    parser.add_argument("notebook", help="a notebook's name, such as 02_topology, or all")
    parser.add_argument("--study", default="demo", help="the folder below outputs/ (default: demo)")
    parser.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"))
    parser.add_argument("--resume", action="store_true", help="go on in a study that exists")
    parser.add_argument("--fresh", action="store_true", help="take the next free name if the study exists")


def run(args: argparse.Namespace) -> int:
    """Execute and print where the report is; 0, or 1 where a notebook failed, 2 where its parameters are to blame."""
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
