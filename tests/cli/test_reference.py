"""docs/reference/commands.md is made from the command line."""

from support import REPOSITORY

from trilane.cli.reference import reference


def test_the_reference_of_commands_is_current():
    """Made anew by `python -m trilane.cli.reference > docs/reference/commands.md`."""
    assert (REPOSITORY / "docs/reference/commands.md").read_text() == reference()
