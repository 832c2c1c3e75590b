"""The pages of docs/reference/, made of the code: `python docs/reference/make.py`."""

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any


def current(page: Path) -> str:
    """A page of the reference with its tables made of the fields; those without words of their own
    stay.
    """
    text = page.read_text(encoding="utf-8")
    return re.sub(r"(?ms)^(## `([\w.]+)`\n.*?^)(\| field \|.*?)(?=^\n|\Z)", _section, text)


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
