"""The reference of all commands: `python -m trilane.cli.reference > docs/reference/commands.md`."""

from collections.abc import Iterator

import click

from trilane.cli.app import root

HEAD = """# Commands

Made from the command line by `python -m trilane.cli.reference > docs/reference/commands.md`; a test holds that it is
current. `python -m trilane` is the same as `trilane`.

PLAN is a plan.json, the folder that holds one, or a file of several plans such as `trilane plan search --json` prints:
then the first, the best, is taken unless `FILE:ID` or `FILE:LABEL` names another.

Exit codes: 0 done, 1 failed or found something, 2 bad input (one line on stderr, `trilane: field=value: the rule`), 130
interrupted, 141 output no longer read; `train` 3 stopped on request, `slurm` 75 SLURM does not answer, or the time of
`watch` is over.
"""


def reference() -> str:
    """The help of every group and command as Markdown."""
    return "\n".join([HEAD, *sections(root, click.Context(root, info_name="trilane", terminal_width=100))])


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
    print(reference(), end="")
