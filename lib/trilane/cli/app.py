"""The command `trilane`: its groups, loaded when asked for, and how errors leave it: one line and an exit code."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click
from click.exceptions import Exit, NoArgsIsHelpError

import trilane
from trilane.cli.options import Group
from trilane.utils.validation import require_known, shipped_json, shown

GROUPS = {
    "run": "execute one notebook of a study, or all in order",
    "plan": "sizes, topologies, one plan in full, dates and risks, the cost model against measurements",
    "train": "train a plan on this machine",
    "measure": "this machine or cluster, the speed of a plan, the equality of the engines",
    "convert": "plans to and from DeepSpeed, Megatron-LM and Hugging Face",
    "slurm": "pre-flight check, scripts, jobs, sweeps, chains",
    "logs": "training logs: parse, tabulate, compare, find loss spikes",
    "debug": "hangs, slow nodes, bad restarts",
}


class Root(Group):
    """The groups of GROUPS, each in the module of its name; `train` and `measure` are next to `run`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(GROUPS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in GROUPS:
            return None
        module = import_module(f"trilane.cli.{'run' if cmd_name in ('train', 'measure') else cmd_name}")
        return module.GROUP if cmd_name not in ("run", "train") else module.ROOT.commands[cmd_name]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(GROUPS.items()))


@click.group(cls=Root, context_settings={"max_content_width": 120})
@click.version_option(trilane.__version__, prog_name="trilane", message="%(prog)s %(version)s")
def root() -> None:
    """Plan, start and read the pre-training of large GPTs. `trilane GROUP COMMAND --help` lists a command's options."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 failed, 2 bad input, 75 SLURM is away, 130 interrupted, 141 unread."""
    try:
        with root.make_context("trilane", list(sys.argv[1:] if argv is None else argv)) as context:
            code = root.invoke(context)
        sys.stdout.flush()
        return int(code or 0)
    except Exit as finished:  # --help, --version
        return finished.exit_code
    except NoArgsIsHelpError as error:
        click.echo(error.message, err=True)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports an error at its exit
        return 141
    except (ValueError, OSError, click.ClickException) as error:
        print("trilane:", shown(message(error), 1000), file=sys.stderr)
        # 75 where SLURM does not answer
        return int(getattr(error, "exit_code", 2)) if isinstance(error, ValueError) else 2
    except (KeyboardInterrupt, click.Abort):
        print("trilane: interrupted; what was written so far stays readable", file=sys.stderr)
        return 130


def message(error: Exception) -> str:
    """The error as `field=value: the rule`."""
    try:
        match error:
            case click.NoSuchOption(option_name=name, ctx=click.Context() as context):
                if successor := shipped_json("successors").get(f"{context.command_path} {name}"):
                    return f"option={name}: is now `{successor}`"
                options = [o for p in context.command.get_params(context) for o in p.opts if o.startswith("-")]
                require_known("option", name, options)
            case click.MissingParameter(param=click.Option(opts=[name, *_])) | click.BadOptionUsage(option_name=name):
                return f"{name}=missing: needs a value"
            case click.MissingParameter(param=click.Parameter(name=name)):
                return f"{name}=missing: is required"
            case click.ClickException():
                return error.format_message()
            case OSError(filename=str() as name, strerror=str() as reason):
                return f"file={name}: {reason}"
    except ValueError as known:
        return str(known)
    return str(error)
