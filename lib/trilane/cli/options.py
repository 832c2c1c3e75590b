"""What commands share: groups with nearest names, types whose errors are one line, options, and the JSON output."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from trilane.utils.validation import (
    parse_count,
    require,
    require_integer,
    require_known,
    require_not_negative,
    require_positive,
)

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
# The flat commands of versions before 0.2, and where they are now.
MOVED = {
    "size": "plan size",
    "search": "plan search",
    "calendar": "plan calendar",
    "backtest": "plan backtest",
    "launch": "train",
    "bench": "measure machine",
    "benchmark": "measure plan",
    "verify": "measure engines",
    "ds-config": "convert deepspeed",
    "megatron-args": "convert megatron",
    "guard": "slurm check",
    **{name: f"slurm {name}" for name in ("script", "submit", "resubmit", "status", "tail", "cancel", "sweep")},
    **{name: f"slurm {name}" for name in ("chain", "attach", "watch", "job")},
    **{name: f"logs {name}" for name in ("parse", "table", "lint", "compare", "spikes")},
    "trace-tail": "debug calls",
    **{name: f"debug {name}" for name in ("hang", "capture", "stragglers", "restart", "rehearse", "bisect")},
}


class Command(click.Command):
    """A command that names the first argument too many."""

    allow_extra_args = True

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; what it returns is the exit code."""
        require(not ctx.args, "argument", next(iter(ctx.args), ""), "is one too many")
        return super().invoke(ctx)


class Group(click.Group):
    """Commands in the order of their definition; an unknown name is answered with the nearest or the new one."""

    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each command and the first sentence of its help."""
        rows = [(name, command.get_short_help_str(limit=200)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names as they were defined."""
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The command that the first word names; ValueError for an unknown one."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known:
            if name.startswith("-"):
                raise click.NoSuchOption(name, ctx=ctx)
            require(name not in MOVED, "command", name, f"is now `trilane {MOVED.get(name)}`")
            require_known("command", name, known)
        return super().resolve_command(ctx, args)


class Whole(click.ParamType):
    """A whole number of at least `minimum` and at most `maximum`."""

    name = "integer"

    def __init__(self, minimum: int = 1, maximum: int = 10**15) -> None:
        self.minimum, self.maximum = minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; ValueError names the option."""
        field = param.name if param and param.name else "value"
        try:
            number: Any = int(value)
        except ValueError:
            number = value
        require_integer(field, number, self.minimum)
        require(number <= self.maximum, field, number, f"must be at most {self.maximum}")
        return int(number)


class Number(click.ParamType):
    """A finite number above zero, or of at least zero."""

    name = "number"

    def __init__(self, is_positive: bool = True) -> None:
        self.require = require_positive if is_positive else require_not_negative

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; ValueError names the option."""
        try:
            number: Any = float(value)
        except ValueError:
            number = value
        self.require(param.name if param and param.name else "value", number)
        return float(number)


class Count(click.ParamType):
    """Parameters or tokens: 40B, 1.3e9, 350M."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; ValueError names the option."""
        return parse_count(param.name if param and param.name else "value", str(value))


class Choice(click.Choice[str]):
    """One of some names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name; ValueError lists the known ones, the nearest first."""
        require_known(param.name if param and param.name else "value", value, self.choices)
        return str(value)

    def fail(self, message: str, param: Any = None, ctx: Any = None) -> NoReturn:
        """Errors are ValueErrors here."""
        raise ValueError(message)


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """An option that shows its default, where it has one."""
    return click.option(*names, **{"show_default": settings.get("default") not in (None, "", False, ()), **settings})


def plan_argument(function: F) -> F:
    """The argument PLAN, as read_plan() takes it."""
    return click.argument("plan", metavar="PLAN", type=FILE)(function)


def json_option(function: F) -> F:
    """--json: one JSON object on stdout instead of text."""
    return click.option("--json", "as_json", is_flag=True, help="print JSON")(function)


def emit(as_json: bool, values: Callable[[], Any], text: Callable[[], str], indent: int | None = 1) -> None:
    """Print the values as JSON, or the text."""
    print(json.dumps(values(), indent=indent, allow_nan=False) if as_json else text())


def calibration_option(function: F) -> F:
    """--calibration: a file of constants."""
    return option("--calibration", metavar="JSON", help="constants fitted to your own runs")(function)


def grid_options(function: F) -> F:
    """--tp, --pp, --dp, --gpus-per-node, for a folder of dumps without plan or topology."""
    function = option("--gpus-per-node", type=Whole(), default=8, help="with --tp, --pp, --dp")(function)
    for name in ("dp", "pp", "tp"):
        help_ = "where the folder has no topology.json or plan.json"
        function = option(f"--{name}", type=Whole(), default=None, help=help_)(function)
    return function


def site_option(function: F) -> F:
    """--site, required."""
    from trilane.slurm import sites

    return option("--site", required=True, help=f"{', '.join(sites.catalogue())}, or a JSON file")(function)


def request_options(function: F) -> F:
    """An option for each field of a JobRequest; the function gets them as keyword arguments of these names."""
    from trilane.slurm.request import CHOICES, JobRequest

    for f in reversed(fields(JobRequest)):
        name = f.name.replace("_", "-")
        if isinstance(f.default, bool):
            function = option(f"--{name}/--no-{name}", default=f.default, show_default=True)(function)
        else:
            kind = Choice(CHOICES[f.name]) if f.name in CHOICES else Whole(0) if isinstance(f.default, int) else str
            function = option(f"--{name}", type=kind, default=f.default)(function)
    return function
