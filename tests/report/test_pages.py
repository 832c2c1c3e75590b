"""Every report of a study can be read: by a screen reader, on a telephone, on paper, and without a network."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import IN_BROWSER

pytestmark = [*IN_BROWSER, pytest.mark.xdist_group("demo")]

NARROW, PAPER = 390, 688  # px: a telephone; A4 (210 mm) without margins of 14 mm at 96 px an inch
LANDSCAPE = 1046  # px: A4 (297 mm) without margins of 10 mm, which the page of a wide table is printed on
NO_VALUE = re.compile(r"undefined|NaN|null")  # what Vega writes for a field that the mark under the mouse lacks
# Pictures and drawings without a text of their own.
SILENT = """() => [...document.querySelectorAll("img, svg, canvas")].filter(e => {
  if (e.parentElement.closest("svg") || !e.getClientRects().length) return false;
  const named = e.closest("[aria-label], [alt]");
  const text = named?.getAttribute("aria-label") ?? named?.getAttribute("alt");
  return !text || text.trim().length < 4;
}).map(e => e.outerHTML.slice(0, 90))"""
# What is cut on paper: its right edge is beyond the page, or it hides what does not fit.
CUT = """width => [...document.querySelectorAll("table, figure, pre, img, svg, p, div")].filter(e => {
  const box = e.getBoundingClientRect();
  const hides = getComputedStyle(e).overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1;
  return box.width && (box.right > width + 1 || hides);
}).map(e => e.outerHTML.slice(0, 90))"""
DRAWN = '[...document.querySelectorAll("figure.chart")].every(f => f.querySelector(".drawing svg"))'

MARKS = """() => [...document.querySelectorAll("figure.chart svg.marks .role-mark > *")].map(mark => {
  const {x, y, width, height} = mark.getBoundingClientRect();
  return [x + scrollX + width / 2, y + scrollY + height / 2, width + height];
}).filter(([x, y, size]) => size > 0).map(([x, y]) => [x, y])"""
TOOLTIP = "document.querySelector('#vg-tooltip-element.visible')?.innerText ?? ''"


def use_every_control(page: Any) -> None:
    """Choose, tick and click in each control and figure."""
    for select in page.locator("figure.chart .vega-bind select").all():
        select.select_option(index=select.locator("option").count() - 1)
    for box in page.locator("figure.chart .vega-bind input[type=checkbox]").all():
        box.click()
    for drawing in page.locator("figure.chart svg.marks").all():
        size = drawing.bounding_box()
        for x, y in itertools.product(range(1, 5), repeat=2):
            drawing.click(position={"x": size["width"] * x / 5, "y": size["height"] * y / 5})
    page.mouse.move(0, 0)  # away from what shows a value under the mouse


def tooltips(page: Any, most: int = 300) -> set[str]:
    """The texts under the mouse over the middles of the drawn marks, of at most about `most` on a page."""
    page.set_viewport_size({"width": 1280, "height": page.evaluate("document.body.scrollHeight")})
    page.evaluate("scrollTo(0, 0)")
    places, found = page.evaluate(MARKS), set()
    for x, y in places[:: max(1, len(places) // most)]:
        page.mouse.move(x, y)
        found.add(page.evaluate(TOOLTIP))
    return found - {""}


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    """A page that records what a report must not do: errors, and requests to anywhere."""
    made = browser.new_page()
    made.wrong = []
    made.on("console", lambda message: made.wrong.append(message.text))
    made.on("pageerror", lambda error: made.wrong.append(str(error)))
    made.on("request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or made.wrong.append(r.url))
    yield made
    made.close()


def wrong(page: Any, path: Path) -> dict[str, list[Any]]:
    """What is wrong with a page, by what was looked for."""
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(media="screen")
    page.goto(path.as_uri())
    page.wait_for_function(DRAWN)
    use_every_control(page)
    found = {"tooltips": [text for text in tooltips(page) if NO_VALUE.search(text)], "no text": page.evaluate(SILENT)}
    page.set_viewport_size({"width": NARROW, "height": 800})
    page.wait_for_timeout(50)  # figures are drawn anew
    page.wait_for_function(DRAWN)
    wide = page.evaluate("document.documentElement.scrollWidth")
    found["wider than a telephone"] = [wide] if wide > NARROW else []
    page.emulate_media(media="print")
    paper = LANDSCAPE if page.evaluate("getComputedStyle(document.body).page") == "broad" else PAPER
    page.set_viewport_size({"width": paper, "height": 1000})
    return {**found, "cut on paper": page.evaluate(CUT, paper)}


def test_every_page_of_a_study_can_be_read(demo: Path, page: Any) -> None:
    pages = sorted(demo.glob("*.html"))
    assert [path.stem for path in pages] == ["01_sizing", "02_topology", "03_launch", "04_analyze", "index", "runs"]
    found = {(path.stem, what): texts for path in pages for what, texts in wrong(page, path).items()}
    assert not {which: texts for which, texts in found.items() if texts}
    assert not page.wrong


def test_the_words_of_a_plan_are_under_the_mouse_and_a_click_picks_it(demo: Path, page: Any) -> None:
    page.emulate_media(media="screen")
    page.set_viewport_size({"width": 1280, "height": 2000})
    page.goto((demo / "02_topology.html").as_uri())
    page.wait_for_function(DRAWN)
    figure = page.locator("figure.chart").first
    figure.scroll_into_view_if_needed()
    boxes = [dot.bounding_box() for dot in figure.locator(".mark-symbol.role-mark path").all()]
    for box in boxes:
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        words = page.evaluate(TOOLTIP)
        assert figure.locator("select").input_value() in words and "GiB" in words and not NO_VALUE.search(words)
    assert boxes
