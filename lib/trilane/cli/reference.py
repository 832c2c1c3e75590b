"""The pages of docs/reference/, made of the code: `python -m trilane.cli.reference docs/reference/*.md`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from trilane.cli.app import root
from trilane.config.reference import with_tables


def current(page: Path) -> str:
    """A page with its tables of fields, or the help of every command below its introduction, made anew."""
    text = page.read_text(encoding="utf-8")
    if page.stem != "commands":
        return with_tables(text)
    helps = sections(root, click.Context(root, info_name="trilane", terminal_width=100))
    return "\n".join([text.partition("\n## trilane\n")[0], *helps])


def sections(command: click.Command, context: click.Context) -> Iterator[str]:
    """The help of a command, and of those below it."""
    depth = len(context.command_path.split())
    yield f"{'#' * min(depth + 1, 4)} {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from sections(below, click.Context(below, info_name=name, parent=context, terminal_width=100))


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(current(path), encoding="utf-8")
