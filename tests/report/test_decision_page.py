"""08_decision as a director reads it: its first screen, one sheet of paper, and one set
of figures.
"""

import json
import os
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from support import REPOSITORY, in_browser

from trilane.config.plan import read_plan
from trilane.report import notebook
from trilane.workspace.study import Study

TITLE = "<script>alert(1)</script> *176B* $x$"
ASKED = {
    "tokens": 341e9,
    "ramp": "192,16,9765625",
    "start": "2027-01-04",
    "deadline": "2027-05-31",
    "allocation": 9e5,
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    """A plan of 384 GPUs that no topology brings within its allocation, so that the page has most
    to say.
    """
    outputs = tmp_path_factory.mktemp("outputs")
    with mock.patch.dict(os.environ, {"TRILANE_OUTPUTS": str(outputs)}):
        made, plan = Study.create("decision"), outputs / "plan.json"
        plan.write_text(json.dumps(read_plan(REPOSITORY / "docs/plan-176b.json").to_json()))
        notebook.run("07_calendar", made, plan=str(plan), price=2.0, runs=1000, **ASKED)
        notebook.run("08_decision", made, title=TITLE)
        yield made


@in_browser
def test_the_verdict_stands_on_the_first_screen_and_the_page_on_one_sheet(
    study: Study, browser: Any
):
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto((study.folder / "08_decision.html").as_uri())
    verdict = page.locator("p", has_text="GPU-hours").first
    box, text = verdict.bounding_box(), verdict.text_content()
    assert box["y"] + box["height"] <= 700
    for part in (
        TITLE,
        "Do not start on 2027-01-04",
        "done by 2027-",
        "P(deadline missed)",
        "GiB",
    ):
        assert part in text, text
    assert len(re.findall(rb"/Type\s*/Page\b", page.pdf(prefer_css_page_size=True))) == 1
    page.set_viewport_size({"width": 703, "height": 1062})  # 186 x 281 mm: A4 within its margins
    page.emulate_media(media="print")
    size = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
    )
    assert size[0] <= 703 and size[1] <= 1062, "nothing is made smaller to fit the sheet"
    page.close()
