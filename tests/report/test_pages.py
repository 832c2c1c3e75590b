"""Every report of a study can be read: by a screen reader, on a telephone, on paper, and without a network."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import IN_BROWSER

pytestmark = [*IN_BROWSER, pytest.mark.xdist_group("demo")]

SHEET = 1016  # px: A4 (297 mm) without margins of 14 mm
NARROW, PAPER = 390, 688  # px: a telephone; A4 (210 mm) without margins of 14 mm at 96 px an inch
LANDSCAPE = 1046  # px: A4 (297 mm) without margins of 10 mm, which the page of a wide table is printed on
AA, AA_LARGE = 4.5, 3.0  # WCAG 2.1, success criterion 1.4.3; large: 24 px, or 18.66 px bold
NO_VALUE = re.compile(r"undefined|NaN|null")  # what Vega writes for a field that the mark under the mouse lacks
# Texts whose contrast with what is behind them is too small. Relative luminance and contrast: WCAG 2.1, section 3.
CONTRAST = """([normal, large]) => {
  const channel = c => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const known = {};
  const rgba = text => known[text] ||= (() => {
    pen.clearRect(0, 0, 1, 1); pen.fillStyle = text; pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  })();
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const behind = e => {
    const color = e ? rgba(getComputedStyle(e).backgroundColor) : [0, 0, 0, 0];
    if (color[3] === 1) return color;
    const root = matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
    return over(color, e ? behind(e.parentElement) : root);
  };
  const drawnBehind = text => {  // shapes of a drawing under the middle of a text
    const box = text.getBoundingClientRect(), svg = text.closest("svg");
    const middle = new DOMPoint(box.x + box.width / 2, box.y + box.height / 2);
    const below = [...svg.querySelectorAll("path, rect")].filter(shape =>
      shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING && getComputedStyle(shape).fill !== "none"
      && shape.isPointInFill(middle.matrixTransform(shape.getScreenCTM().inverse())));
    return below.reduce((color, shape) => {
      const style = getComputedStyle(shape), fill = rgba(style.fill);
      return over([...fill.slice(0, 3), fill[3] * style.fillOpacity * style.opacity], color);
    }, behind(svg));
  };
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), e = walker.currentNode.parentElement;
    if (!text || e.closest("script, style, noscript") || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), back = e.closest("svg") ? drawnBehind(e) : behind(e);
    const size = parseFloat(style.fontSize), bold = parseInt(style.fontWeight) >= 700;
    const ink = rgba(e.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(over(ink, back)), light(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = `${e.tagName}.${e.className.baseVal ?? e.className} ${ink}`;
    if (ratio < (size >= 24 || bold && size >= 18.66 ? large : normal))
      found[name] ||= `${ratio.toFixed(2)}: ${text.slice(0, 40)}`;
  }
  return Object.entries(found).map(([name, text]) => `${name} ${text}`);
}"""
# Pictures and drawings without a text of their own.
SILENT = """() => [...document.querySelectorAll("img, svg, canvas")].filter(e => {
  if (e.parentElement.closest("svg") || !e.getClientRects().length) return false;
  const named = e.closest("[aria-label], [alt]");
  const text = named?.getAttribute("aria-label") ?? named?.getAttribute("alt");
  return !text || text.trim().length < 4;
}).map(e => e.outerHTML.slice(0, 90))"""
# Tables and figures of which one covers a part of another, where they can be seen.
COVERED = """() => {
  const seen = e => {
    let {left, top, right, bottom} = e.getBoundingClientRect();
    for (let p = e.parentElement; p; p = p.parentElement) {
      const frame = p.getBoundingClientRect();
      if (getComputedStyle(p).overflowX !== "visible")
        [left, right] = [Math.max(left, frame.left), Math.min(right, frame.right)];
    }
    return {e, left, top, right, bottom};
  };
  const boxes = [...document.querySelectorAll("table, figure")]
    .filter(e => e.checkVisibility({contentVisibilityAuto: true, visibilityProperty: true}))
    .map(seen).filter(b => b.right > b.left);
  return boxes.filter((a, i) => boxes.slice(i + 1).some(b => !a.e.contains(b.e) && a.left < b.right - 1
    && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)).map(b => b.e.innerText.slice(0, 90));
}"""
# Pictures that are white where the page is dark.
GLARING = """() => [...document.querySelectorAll("figure img")].filter(
  e => e.getClientRects().length && getComputedStyle(e).filter === "none").map(e => e.alt)"""
# What is cut on paper: its right edge is beyond the page, it hides what does not fit, or it is taller than a page.
CUT = """([width, sheet]) => [...document.querySelectorAll("table, figure, pre, img, svg, p, div")].filter(e => {
  const box = e.getBoundingClientRect();
  const hides = getComputedStyle(e).overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1;
  return box.width && (box.right > width + 1 || hides || e.localName === "img" && box.height > sheet);
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
    found: dict[str, list[Any]] = {}
    for scheme in ("light", "dark"):
        page.set_viewport_size({"width": 1280, "height": 900})
        page.emulate_media(media="screen", color_scheme=scheme)
        page.goto(path.as_uri())
        page.wait_for_function(DRAWN)
        use_every_control(page)
        found[f"contrast, {scheme}"] = page.evaluate(CONTRAST, [AA, AA_LARGE])
    looks = {"white in the dark": GLARING, "no text": SILENT, "covered": COVERED}
    found |= {name: page.evaluate(look) for name, look in looks.items()}
    found["tooltips"] = [text for text in tooltips(page) if NO_VALUE.search(text)]
    page.set_viewport_size({"width": NARROW, "height": 800})
    page.wait_for_timeout(50)  # figures are drawn anew
    page.wait_for_function(DRAWN)
    wide = page.evaluate("document.documentElement.scrollWidth")
    found["wider than a telephone"] = [wide] if wide > NARROW else []
    page.emulate_media(media="print", color_scheme="light")
    paper = LANDSCAPE if page.evaluate("getComputedStyle(document.body).page") == "broad" else PAPER
    page.set_viewport_size({"width": paper, "height": 1000})
    return {**found, "cut on paper": page.evaluate(CUT, [paper, SHEET])}


def test_every_page_of_a_study_can_be_read(demo: Path, page: Any) -> None:
    pages = sorted(demo.glob("*.html"))
    assert [path.stem for path in pages] == ["01_sizing", "02_topology", "03_launch", "04_analyze", "index", "runs"]
    found = {(path.stem, what): texts for path in pages for what, texts in wrong(page, path).items()}
    assert not {which: texts for which, texts in found.items() if texts}
    assert not page.wrong


def test_the_words_of_a_plan_are_under_the_mouse_and_a_click_picks_it(demo: Path, page: Any) -> None:
    page.emulate_media(media="screen", color_scheme="light")
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
