"""The command `trilane`: its groups, loaded when asked for, and how errors leave it: one line and
an exit code.

A command is made of a function: a parameter without default is an argument, one with a declared
field is an option. Fields are declared as those of dataclasses are (config/options.py). A dataclass
as type gives an option for each of its fields; so does `**given: Annotated[Any, SizeRequest,
Topology | None]`, where `| None` hands on only what is given.
"""

import contextlib
import dataclasses
import inspect
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import click
from click.exceptions import Exit, NoArgsIsHelpError

import trilane
from trilane.config.options import check_value, option
from trilane.utils import validation
from trilane.utils.hooks import hook
from trilane.utils.process import install_command
from trilane.utils.tables import one_line, printable

GROUPS = {
    "run": "execute one notebook of a study, or all in order",
    "plan": "sizes, topologies, one plan in full, dates and risks, the cost model against measurements",
    "calibrate": "the constants of predictions, fitted to your own runs",
    "train": "train a plan on this machine",
    "measure": "this machine or cluster, the speed of a plan, the equality of the engines",
    "convert": "plans to and from DeepSpeed, Megatron-LM and Hugging Face",
    "slurm": "pre-flight check, scripts, jobs, sweeps, chains",
    "logs": "training logs: parse, tabulate, compare, find loss spikes",
    "debug": "hangs, slow nodes, bad restarts",
}


class Group(click.Group):
    """Commands in the order of their definition; an unknown name is answered with the nearest or
    the new one.
    """

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, c.get_short_help_str(limit=200)) for name, c in self.commands.items()]
            )

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The command that the first word names; ValueError for an unknown one."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known:
            if name.startswith("-"):
                raise click.NoSuchOption(name, ctx=ctx)
            validation.require_known("command", name, known)
        return super().resolve_command(ctx, args)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command prints: `values` with --json, else `text`; without one always the values."""

    values: Any
    text: str | None = None
    failed: object = False

    @classmethod
    def of(cls, found: Any, failed: object = False) -> "Answer":
        """The answer of what has to_json() and to_text()."""
        return cls(found.to_json(), found.to_text(), failed)

    @classmethod
    def lines(cls, name: str, text: str) -> "Answer":
        """A text, whose lines are a list of that name in JSON."""
        return cls({name: text.splitlines()}, text.removesuffix("\n"))

    def show(self, as_json: bool) -> int:
        """Print it; the exit code, 1 where something failed or was found."""
        is_json = as_json or self.text is None
        print(
            json.dumps(self.values, indent=1, allow_nan=False)
            if is_json
            else printable(self.text or "")
        )
        return 1 if self.failed else 0


def note(lines: Iterable[str], label: str = "trilane: ") -> None:
    """Print lines to stderr."""
    for line in lines:
        print(f"{label}{one_line(line)}", file=sys.stderr)


class Typed(click.ParamType):
    """The type of an option, whose rule is that of its field. Raises ValueError, `option=value: the
    rule`.
    """

    def __init__(self, kind: Any, facts: Any) -> None:
        self.kind = kind if kind in (int, float, bool, Path) else str
        self.name, self.facts = {int: "integer", float: "number"}.get(self.kind, "text"), facts
        self.words = ("no", "yes") if kind is bool else facts.get("choices", ())

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return f"[{'|'.join(self.words)}]" if self.words else None

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "read" in self.facts:
            return self.facts["read"](value)
        name, made = self.facts.get("name", param.name if param else ""), value
        # Path("") is the current folder, which nobody means by an empty variable of a shell
        validation.require(self.kind is not Path or value != "", name, repr(value), "is empty")
        try:
            is_count = (
                self.kind is float and str(value)[-1:] in "KMBTkmbt"
            )  # 40B, as people write numbers
            made = (
                validation.parse_count("", value)
                if is_count
                else value
                if self.kind is bool
                else self.kind(value)
            )
        except ValueError:
            pass  # no number: the rule names it
        if self.words or self.kind in (int, float):
            check_value(
                name, made, self.kind is int, {"choices": self.words} if self.words else self.facts
            )
        return made == "yes" if self.kind is bool else made


def declared(p: inspect.Parameter, hint: Any) -> Iterator[tuple[Any, click.Parameter]]:
    """The default, ... for none, and the parameter of click for each name that a command's
    parameter stands for.
    """
    field = option(argument="") if p.default is p.empty else p.default
    word, is_needed = field.metadata.get("argument"), field.default is dataclasses.MISSING
    kind = Typed(_kind(hint), field.metadata)
    if p.kind is p.VAR_POSITIONAL:
        yield (), click.Argument([p.name], nargs=-1, required=not _may_miss(hint), type=kind)
    elif p.kind is p.VAR_KEYWORD or (p.default is p.empty and dataclasses.is_dataclass(hint)):
        for source in typing.get_args(hint)[1:] or [hint]:
            is_open = _may_miss(source)
            for f in (f for f in dataclasses.fields(_kind(source)) if f.metadata.get("cli", True)):
                yield ... if is_open else f.default, _option(f.name, f.type, f, is_open)
    elif word is not None:
        argument = click.Argument([p.name], required=is_needed, type=kind, metavar=word or None)
        yield ... if is_needed else field.default, argument
    else:
        yield field.default, _option(p.name, hint, field)


def _option(name: str, hint: Any, field: Any, is_open: bool = False) -> click.Option:
    """The option of a field; one that `is_open` has neither default nor need to be given."""
    facts, is_list = field.metadata, typing.get_origin(hint) is tuple
    flag = f"--{facts.get('name', name).replace('_', '-')}"
    is_needed = field.default is dataclasses.MISSING and not is_open
    default = None if is_open or is_needed or callable(field.default) else field.default or None
    shown = f"{default:g}" if isinstance(default, float) else default is not None
    settings: dict[str, Any] = {"help": facts["help"], "show_default": shown}
    settings |= (
        {"default": default} if default is not None else {}
    )  # click takes a None for a value
    if hint is bool and not is_open:
        settings["is_flag"] = True
        flag += f"/--no-{flag[2:]}" * bool(field.default)
    else:
        kind = Typed(typing.get_args(hint)[0] if is_list else _kind(hint), facts)
        settings |= {
            "type": kind,
            "metavar": facts.get("metavar"),
            "multiple": is_list,
            "nargs": facts.get("nargs", 1),
        }
    return click.Option(
        [*filter(None, [facts.get("short")]), flag, name], required=is_needed, **settings
    )


def _may_miss(hint: Any) -> bool:
    return bool({None, types.NoneType} & {*typing.get_args(hint)})


def _kind(hint: Any) -> Any:
    return typing.get_args(hint)[0] if _may_miss(hint) else hint


def command(
    group: click.Group, name: str = "", cls: type[click.Command] = click.Command
) -> Callable[[Callable], Any]:
    """Add a function to the group as a command with --json; its Answer is printed, an int is the
    exit code.

    A function that returns None or an int has no --json, unless it has a parameter `as_json`.
    """

    def add(function: Callable) -> Callable:
        signature, hints = (
            inspect.signature(function),
            typing.get_type_hints(function, include_extras=True),
        )
        known = dict[str, tuple[str, Any, click.Parameter]]()
        for p in (p for p in signature.parameters.values() if p.name != "as_json"):
            for default, made in declared(p, hints[p.name]):
                known.setdefault(
                    str(made.name), (p.name, default, made)
                )  # a keyword goes before a field of that name
        shown: list[click.Parameter] = [made for *_, made in known.values()]
        takes_json = "as_json" in signature.parameters
        if takes_json or signature.return_annotation not in (None, int):
            shown.append(click.Option(["--json", "as_json"], is_flag=True, help="print JSON"))

        def run(as_json: bool = False, **given: Any) -> int:
            extra = click.get_current_context().args
            validation.require(not extra, "argument", next(iter(extra), ""), "is one too many")
            words, keywords = (), dict[str, Any]({"as_json": as_json} if takes_json else {})
            for p in signature.parameters.values():
                own = {
                    n: d if given[n] is None else given[n]
                    for n, (taker, d, _) in known.items()
                    if taker == p.name
                }
                if p.kind is p.VAR_POSITIONAL:
                    words = own[p.name]
                elif p.kind is p.VAR_KEYWORD:
                    keywords |= {n: v for n, v in own.items() if v is not ...}
                elif own:
                    keywords[p.name] = own[p.name] if p.name in own else p.annotation(**own)
            answer = function(*words, **keywords)
            return answer.show(as_json) if isinstance(answer, Answer) else answer

        settings: Any = {"callback": run, "params": shown, "help": inspect.getdoc(function)}
        group.add_command(
            cls(name or function.__name__, context_settings={"allow_extra_args": True}, **settings)
        )
        return function

    return add


class Root(Group):
    """The groups of GROUPS, each in the module of its name; `calibrate`, `train` and `measure` are
    next to `run`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(GROUPS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in GROUPS:
            return None
        if cmd_name == "debug":
            return hook("debug")
        alone = ("run", "calibrate", "train")
        module = import_module(
            f"trilane.cli.{'run' if cmd_name in (*alone, 'measure') else cmd_name}"
        )
        return module.ROOT.commands[cmd_name] if cmd_name in alone else module.GROUP

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(GROUPS.items()))


@click.group(
    cls=Root, context_settings={"max_content_width": 120, "help_option_names": ["-h", "--help"]}
)
@click.version_option(trilane.__version__, prog_name="trilane", message="%(prog)s %(version)s")
def root() -> None:
    """Plan, start and read the pre-training of large GPTs. `trilane GROUP COMMAND --help` lists a
    command's options.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 failed, 2 bad input, 75 SLURM is away, 130
    interrupted, 141 unread.
    """
    try:
        with root.make_context("trilane", list(sys.argv[1:] if argv is None else argv)) as context:
            code = root.invoke(context)
        print(end="", flush=True)  # where stdout is closed there is none to flush
        return int(code or 0)
    except Exit as finished:  # --help, --version
        return finished.exit_code
    except NoArgsIsHelpError as error:
        click.echo(error.message, err=True)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has ended
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or Python reports an error at its exit
        return 141
    except (ValueError, OSError, click.ClickException) as error:
        print("trilane:", validation.shown(message(error), 1000), file=sys.stderr)
        # 75 where SLURM does not answer
        return int(getattr(error, "exit_code", 2)) if isinstance(error, ValueError) else 2
    except ModuleNotFoundError as error:
        if not (extra := extra_of(error.name or "")):
            raise
        print(
            f"trilane: {error.name}=missing: is installed by {install_command(extra)}",
            file=sys.stderr,
        )
        return 2
    except (KeyboardInterrupt, click.Abort):
        print("trilane: interrupted; what was written so far stays readable", file=sys.stderr)
        return 130


def extra_of(module: str) -> str:
    """The extra of this installation that brings a module; "" where none does."""
    lines: Sequence[str] = ()
    package = (
        {"PIL": "pillow"}.get(module.partition(".")[0], module.partition(".")[0])
        .lower()
        .replace("_", "-")
    )
    with contextlib.suppress(metadata.PackageNotFoundError):  # a copy of the code in a run folder
        lines = metadata.requires("trilane") or []
    for line in lines:
        if found := re.match(
            rf"{re.escape(package)}\b[^;]*;.*extra == ['\"](\w+)", line.lower().replace("_", "-")
        ):
            return found[1]
    return ""


def message(error: Exception) -> str:
    """The error as `field=value: the rule`."""
    try:
        match error:
            case click.NoSuchOption(option_name=name, ctx=click.Context() as context):
                options = [
                    o
                    for p in context.command.get_params(context)
                    for o in p.opts
                    if o.startswith("-")
                ]
                validation.require_known("option", name, options)
            case (
                click.MissingParameter(param=click.Option(opts=[name, *_]))
                | click.BadOptionUsage(option_name=name)
            ):
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
