"""The pages of docs/reference/, made of the code: `python docs/reference/make.py`."""

import dataclasses
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from trilane.cli.app import root


def current(page: Path) -> str:
    """A page with its tables of fields, or the help of every command below its introduction, made
    anew.
    """
    text = page.read_text(encoding="utf-8")
    if page.stem != "commands":
        return with_tables(text)
    settings = {**root.context_settings, "terminal_width": 100}
    helps = sections(root, click.Context(root, info_name="trilane", **settings))
    return "\n".join([text.partition("\n## trilane\n")[0], *helps])


def sections(command: click.Command, context: click.Context) -> Iterator[str]:
    """The help of a command, and of those below it."""
    depth = len(context.command_path.split())
    yield f"{'#' * min(depth + 1, 4)} {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from sections(
                below, click.Context(below, info_name=name, parent=context, terminal_width=100)
            )


def with_tables(page: str) -> str:
    """A page of the reference with its tables made of the fields; those without words of their own
    stay.
    """
    return re.sub(r"(?ms)^(## `([\w.]+)`\n.*?^)(\| field \|.*?)(?=^\n|\Z)", _section, page)


def _section(found: re.Match[str]) -> str:
    module, _, name = found[2].rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    documented = all(field.metadata.get("help") for field in dataclasses.fields(kind))
    return found[1] + (table(kind) if documented else found[3])


def table(kind: Any) -> str:
    """The fields of a dataclass as Markdown, each with its default, its choices and its meaning."""
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        choices = ", ".join(f"`{word}`" for word in field.metadata.get("choices", ()))
        meaning = f"{choices}: {field.metadata['help']}" if choices else field.metadata["help"]
        lines.append(
            f"| `{field.name}` | {_default(field)} | {meaning}".replace(
                "|embedding", "\\|embedding"
            )
            + " |"
        )
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    if field.default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else "see below"
    text = (
        field.default
        if field.default and isinstance(field.default, str)
        else json.dumps(field.default)
    )
    return (
        text
        if isinstance(field.default, int | float) and not isinstance(field.default, bool)
        else f"`{text}`"
    )


if __name__ == "__main__":
    for path in Path(__file__).parent.glob("*.md"):
        path.write_text(current(path), encoding="utf-8")
