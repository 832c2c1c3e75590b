"""The pages of docs/reference/ are made of the code."""

import pytest
from support import REPOSITORY

from trilane.cli.reference import current

PAGES = sorted((REPOSITORY / "docs/reference").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_the_reference_is_current(page):
    """Written again by `python -m trilane.cli.reference docs/reference/*.md`."""
    assert page.read_text() == current(page)
