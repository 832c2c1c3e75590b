"""What commands share: groups with nearest names, types whose errors are one line, options, and the JSON output."""

import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

import click

from trilane.utils import validation
from trilane.utils.tables import printable

Parameter = Callable[[Any], Any]  # a decorator that adds an option or an argument
FILE = click.Path(path_type=Path)
# The flat commands of versions before 0.2, and where they are now.
MOVED = {
    **{name: f"plan {name}" for name in ("size", "search", "calendar", "backtest")},
    **{"launch": "train", "bench": "measure machine", "benchmark": "measure plan", "verify": "measure engines"},
    **{"ds-config": "convert deepspeed", "megatron-args": "convert megatron", "guard": "slurm check"},
    **{name: f"slurm {name}" for name in ("script", "submit", "status", "cancel", "sweep", "chain", "watch", "job")},
    **{name: f"logs {name}" for name in ("parse", "table", "compare", "spikes")},
    "lint": "logs parse",  # which checks the rows that it reads
    **{name: f"debug {name}" for name in ("hang", "capture", "stragglers", "restart", "rehearse", "bisect")},
    "trace-tail": "debug calls",
    # of `trilane slurm`
    **{"tail": "slurm status --lines", "resubmit": "slurm submit", "alert": "slurm watch", "attach": "debug capture"},
}


class Command(click.Command):
    """A command that names the first argument too many."""

    allow_extra_args = True

    def invoke(self, ctx: click.Context) -> Any:
        validation.require(not ctx.args, "argument", next(iter(ctx.args), ""), "is one too many")
        return super().invoke(ctx)


class Group(click.Group):
    """Commands in the order of their definition; an unknown name is answered with the nearest or the new one."""

    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, command.get_short_help_str(limit=200)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The command that the first word names; ValueError for an unknown one."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known:
            if name.startswith("-"):
                raise click.NoSuchOption(name, ctx=ctx)
            validation.require(name not in MOVED, "command", name, f"is now `trilane {MOVED.get(name)}`")
            validation.require_known("command", name, known)
        return super().resolve_command(ctx, args)


class Checked(click.ParamType):
    """The value that `read` makes of an option's name and text; its ValueError names the option."""

    def __init__(self, name: str, read: Callable[[str, Any], Any]) -> None:
        self.name, self.read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.read(field_of(param), value)


def field_of(param: click.Parameter | None) -> str:
    """The name of a parameter in messages."""
    return param.name if param and param.name else "value"


def converted(kind: type, value: Any) -> Any:
    """The value as that kind of number; unchanged where it is none, for a check to name it."""
    try:
        return kind(value)
    except ValueError:
        return value


def whole(minimum: int = 1, maximum: int = 10**15) -> Checked:
    """A whole number of at least `minimum` and at most `maximum`."""

    def read(field: str, value: Any) -> int:
        number = converted(int, value)
        validation.require_integer(field, number, minimum, maximum)
        return int(number)

    return Checked("integer", read)


def number(is_positive: bool = True) -> Checked:
    """A finite number above zero, or of at least zero."""

    def read(field: str, value: Any) -> float:
        (validation.require_positive if is_positive else validation.require_not_negative)(
            field, converted(float, value)
        )
        return float(value)

    return Checked("number", read)


# parameters or tokens: 40B, 1.3e9, 350M
COUNT = Checked("count", lambda field, value: validation.parse_count(field, str(value)))


class Choice(click.Choice[str]):
    """One of some names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name; ValueError lists the known ones, the nearest first."""
        validation.require_known(field_of(param), value, self.choices)
        return str(value)

    def fail(self, message: str, param: Any = None, ctx: Any = None) -> NoReturn:
        raise ValueError(message)


def option(*names: str, **settings: Any) -> Parameter:
    """An option that shows its default, where it has one."""
    return click.option(*names, **{"show_default": settings.get("default") not in (None, "", False, ()), **settings})


def command(group: click.Group, *parameters: Parameter, **settings: Any) -> Callable[[Callable], click.Command]:
    """A command of the group with these parameters, in the order of its help; `settings` are click's."""
    return lambda function: group.command(**settings)(together(*parameters)(function))


def together(*parameters: Parameter) -> Parameter:
    """Several parameters as one."""
    return lambda function: reduce(lambda decorated, add: add(decorated), reversed(parameters), function)


PLAN = click.argument("plan", metavar="PLAN", type=FILE)  # as read_plan() takes it
FOLDER = click.argument("folder", type=FILE)
JSON = click.option("--json", "as_json", is_flag=True, help="print JSON")


def emit(as_json: bool, values: Any, text: str, indent: int | None = 1, *, failed: object = False) -> int:
    """Print the values as JSON, or the text; the exit code, 1 where something failed or was found."""
    print(json.dumps(values, indent=indent, allow_nan=False) if as_json else printable(text))
    return 1 if failed else 0
