"""The pages of docs/reference/ are made of the code."""

import runpy

import pytest
from support import REPOSITORY

PAGES = sorted((REPOSITORY / "docs/reference").glob("*.md"))
MAKE = runpy.run_path(str(REPOSITORY / "docs/reference/make.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_the_reference_is_current(page):
    """Written again by `python docs/reference/make.py`."""
    assert page.read_text() == MAKE["current"](page)
