"""The command `trilane`: its groups, imported when asked for, and how errors leave it: one line and
an exit code.

A command is made of a function. A parameter without default is an argument; one whose default is
declared by config.options.option() is an option. A dataclass as type gives an option for each of
its fields; `**given: Annotated[Any, SizeRequest]` and `choices: Annotated[dict[str, Any],
Topology]` take what was given of them.
"""

import dataclasses
import inspect
import json
import os
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.exceptions import Exit, NoArgsIsHelpError

import trilane
from trilane.config.options import YES_OR_NO, option, read_value
from trilane.utils.hooks import hook
from trilane.utils.masking import masked
from trilane.utils.process import install_command
from trilane.utils.tables import one_line, printable
from trilane.utils.validation import require, shipped_json, shown

GROUPS = shipped_json("commands")["groups"]


class Group(click.Group):
    """Commands in the order of their definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class Root(click.Group):
    """The groups and commands of GROUPS, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(GROUPS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(GROUPS.items()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in GROUPS:
            return None
        if cmd_name == "debug":
            return hook("debug")
        module = shipped_json("commands")["modules"].get(cmd_name, cmd_name)
        return getattr(import_module(f"trilane.cli.{module}"), cmd_name)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command prints: `values` with --json or without a text, else `text`; and its exit
    code.
    """

    values: Any = None
    text: str | None = None
    code: int = 0

    @classmethod
    def of(cls, found: Any, failed: object = False) -> "Answer":
        """The answer of what has to_json() and summary(); exit code 1 where it `failed`."""
        return cls(found.to_json(), found.summary(), bool(failed))

    def show(self, as_json: bool) -> int:
        """Print it; the exit code."""
        if self.text is not None and not as_json:
            print(printable(self.text).removesuffix("\n"))
        elif self.values is not None:
            print(masked(json.dumps(self.values, indent=1, allow_nan=False)))
        return self.code


def note(lines: Iterable[str]) -> None:
    """Print lines to stderr."""
    for line in lines:
        print("trilane:", one_line(line), file=sys.stderr)


class Typed(click.ParamType):
    """The type of an option, whose rule is that of its field. Raises ValueError, `option=value: the
    rule`.
    """

    def __init__(self, kind: Any, facts: Any) -> None:
        self.kind = kind
        self.facts = facts
        self.name = getattr(kind, "__name__", "text")
        self.words = YES_OR_NO if kind is bool else facts.get("choices", ())

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        if self.words:
            return f"[{'|'.join(self.words)}]"
        return None

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = self.facts.get("name", param.name if param else "")
        if "read" in self.facts:
            return self.facts["read"](value)
        if self.kind is Path:
            # Path("") is the current folder, which nobody means by an empty variable of a shell
            require(value != "", name, repr(value), "is empty")
            return Path(value)
        return read_value(name, value, self.kind, self.facts)


def parameters_of(p: inspect.Parameter, hint: Any) -> list[click.Parameter]:
    """What a parameter of a command is on the command line."""
    (source,) = getattr(hint, "__metadata__", [hint])
    if dataclasses.is_dataclass(source):
        fields = [f for f in dataclasses.fields(source) if f.metadata.get("cli", True)]
        return [_parameter(f.name, f.type, f, _is_open(hint)) for f in fields]
    field = p.default
    if field is p.empty:
        field = option(argument=None)
    return [_parameter(p.name, hint, field)]


def _is_open(hint: Any) -> bool:
    """Whether a parameter takes what was given of a dataclass's fields as a dictionary."""
    return getattr(hint, "__origin__", None) == dict[str, Any]


def _parameter(name: str, hint: Any, field: Any, is_open: bool = False) -> click.Parameter:
    """The argument or option of a field; one that `is_open` has no default, and may be left out."""
    facts = field.metadata
    is_several = typing.get_origin(hint) is tuple
    # of tuple[int, ...] and int | None the first
    kinds = typing.get_args(hint) or [hint]
    kind = Typed(kinds[0], facts)
    required = field.default is dataclasses.MISSING and not is_open
    if "argument" in facts:
        nargs = -1 if is_several else 1
        metavar = facts["argument"]
        return click.Argument([name], required=required, type=kind, nargs=nargs, metavar=metavar)
    flag = f"--{facts.get('name', name).replace('_', '-')}"
    if hint is bool and not is_open:
        if field.default:
            flag += f"/--no-{flag[2:]}"
        return click.Option([flag, name], is_flag=True, default=field.default, help=facts["help"])
    names = [flag, name]
    if "short" in facts:
        names.insert(0, facts["short"])
    settings = {"metavar": facts.get("metavar"), "nargs": facts.get("nargs", 1)}
    if not required and not is_open and field.default:
        settings["show_default"] = str(field.default)
    several = {"multiple": is_several, "required": required}
    return click.Option(names, type=kind, help=facts["help"], **several, **settings)


def command(group: click.Group | None, name: str = "") -> Callable[[Callable], click.Command]:
    """Make a function a command of the group, with --json where it returns an Answer; an int is the
    exit code.
    """

    def add(function: Callable) -> click.Command:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())
        # of options with one name the first counts: those of a dictionary come last
        parameters.sort(key=lambda p: _is_open(hints[p.name]))
        takers = {}  # what each option is for
        shown = []
        for p in parameters:
            for one in parameters_of(p, hints[p.name]):
                if one.name not in takers:
                    takers[str(one.name)] = p
                    shown.append(one)
        if hints["return"] is Answer:
            shown.append(click.Option(["--json", "as_json"], is_flag=True, help="print JSON"))

        def run(as_json: bool = False, **given: Any) -> int:
            keywords = dict[str, Any]()
            for p in parameters:
                values = {n: v for n, v in given.items() if takers[n] is p and v is not None}
                if p.kind is p.VAR_KEYWORD:
                    keywords |= values
                elif p.name in given:
                    keywords[p.name] = values[p.name] if values else p.default.default
                else:
                    # dict of Annotated[dict[str, Any], Topology]
                    kind = getattr(hints[p.name], "__origin__", hints[p.name])
                    keywords[p.name] = kind(**values)
            answer = function(**keywords)
            if isinstance(answer, Answer):
                return answer.show(as_json)
            return answer

        help = inspect.getdoc(function)
        made = click.Command(name or function.__name__, callback=run, params=shown, help=help)
        if group:
            group.add_command(made)
        return made

    return add


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
        # or Python reports an error at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, click.ClickException) as error:
        note([shown(message(error), 1000)])
        # 75 where SLURM does not answer
        return int(getattr(error, "exit_code", 2))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trilane"):
            raise
        # what the command itself imports is installed with it, but for notebooks
        extra = "train" if error.name == "torch" else "notebooks"
        note([f"{error.name}=missing: is installed by {install_command(extra)}"])
        return 2
    except (KeyboardInterrupt, click.Abort):
        note(["interrupted; what was written so far stays readable"])
        return 130


def message(error: Exception) -> str:
    """The error as `field=value: the rule`."""
    match error:
        case click.UsageError():
            path = error.ctx.command_path if error.ctx else "trilane"
            return f"command={path}: {error.format_message()}"
        case OSError(filename=str() as name, strerror=str() as reason):
            return f"file={name}: {reason}"
    return str(error)
