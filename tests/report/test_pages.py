"""Every report of a study can be read: by a screen reader, on a telephone, on paper, and without a
network.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import IN_BROWSER, REPOSITORY

pytestmark = [*IN_BROWSER, pytest.mark.xdist_group("demo")]

SHEET = 1016  # px: A4 (297 mm) without margins of 14 mm
NARROW, PAPER = 390, 688  # px: a telephone; A4 (210 mm) without margins of 14 mm at 96 px an inch
SIGNED = 703  # px: A4 without margins of 12 mm, of the sheet that is signed
AA, AA_LARGE = 4.5, 3.0  # WCAG 2.1, success criterion 1.4.3; large: 24 px, or 18.66 px bold
LEAST = 11  # px
PLOTS = REPOSITORY / "lib/trilane/report/plots"
NO_VALUE = re.compile(
    r"\b(undefined|NaN|null|Infinity)\b|\[object"
)  # what Vega writes for a field that the mark under the mouse lacks
# Texts whose contrast with what is behind them is too small. Relative luminance and contrast: WCAG
# 2.1, section 3.
CONTRAST = """([normal, large]) => {
  // marks that answer no mouse are below a letter, too
  const shapes = [...document.querySelectorAll("svg path, svg rect, svg line")];
  shapes.forEach(e => e.style.pointerEvents = "all");
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
    const below = document.elementsFromPoint(middle.x, middle.y).filter(e => e.matches("svg path, svg rect, svg line"));
    return below.reverse().reduce((color, shape) => {
      const style = getComputedStyle(shape), at = middle.matrixTransform(shape.getScreenCTM().inverse());
      const part = shape.localName !== "line" && shape.isPointInFill(at) ? "fill" : "stroke";
      if (style[part] === "none") return color;
      const paint = rgba(style[part]);
      return over([...paint.slice(0, 3), paint[3] * style[`${part}Opacity`] * style.opacity], color);
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
  shapes.forEach(e => e.style.pointerEvents = "");
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
# Pictures that are white where the page is dark, and drawings on white.
GLARING = """() => [...document.querySelectorAll("img, svg.marks .background")].filter(e => e.getClientRects().length
  && (e.localName === "img" ? getComputedStyle(e).filter === "none" : getComputedStyle(e).fill === "rgb(255, 255, 255)")
).map(e => e.alt ?? e.outerHTML)"""
# Letters that are lower than so many pixels: of text, of drawings, and of pictures, whose smallest
# have `points`.
SMALL = """([least, points]) => {
  const dots = src => { // an inch, as the PNG says
    const head = atob(src.slice(22, 422)), at = head.indexOf("pHYs") + 4;
    return at < 4 ? NaN : .0254 * [0, 1, 2, 3].reduce((sum, i) => 256 * sum + head.charCodeAt(at + i), 0);
  };
  const scale = e => Math.hypot(e.getScreenCTM().c, e.getScreenCTM().d);
  const drawn = [...document.querySelectorAll("svg text")].map(e => [e, scale(e)]);
  const texts = [...document.querySelectorAll("body *")].filter(e => !e.closest("svg, script, style")
    && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).map(e => [e, 1]);
  const sizes = [...drawn, ...texts].map(([e, scale]) => [e, scale * parseFloat(getComputedStyle(e).fontSize)]);
  for (const e of document.querySelectorAll("figure img"))
    sizes.push([e, points / 72 * dots(e.src) * e.clientWidth / e.naturalWidth]);
  return sizes.filter(([e, size]) => e.getClientRects().length && e.textContent.trim() + e.alt && size < least - .05)
    .map(([e, size]) => `${size.toFixed(1)}: ${e.alt ?? e.textContent.trim().slice(0, 40)}`);
}"""
POINTS = min(
    float(size)
    for path in PLOTS.glob("*.py")
    for size in re.findall(r"(?:font|label)size=([\d.]+)", path.read_text())
)
# What goes on behind an edge without a mark that it does, and letters of a drawing beyond its edge.
UNMARKED = """() => [...document.querySelectorAll("body *")].filter(e => {
  const style = getComputedStyle(e), svg = e.closest("svg");
  const right = e => e.getBoundingClientRect().right;
  if (svg) return e.localName === "text" && e.textContent && right(e) > right(svg) + 2;
  const hides = e.clientWidth && e.scrollWidth > e.clientWidth + 1 && style.overflowX !== "visible";
  return hides && !style.backgroundImage.includes("gradient");
}).map(e => e.outerHTML.slice(0, 200))"""
# What is cut on paper: its right edge is beyond the page, it hides what does not fit, or it is
# taller than a page; and figures and rows that may break.
CUT = """([width, sheet]) => [...document.querySelectorAll("table, figure, pre, img, svg, p, div, tr")].filter(e => {
  const box = e.getBoundingClientRect(), style = getComputedStyle(e);
  const hides = style.overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1;
  const is_whole = !["figure", "tr"].includes(e.localName) || style.breakInside === "avoid" && box.height < sheet;
  return box.width && (box.right > width + 1 || hides || !is_whole || e.localName === "img" && box.height > sheet);
}).map(e => e.outerHTML.slice(0, 90))"""
# Words of drawings, tables and controls, and those under the mouse: at three places of each of at
# most `most` marks.
WORDS = """most => {
  const found = new Set([...document.querySelectorAll("svg text, svg [aria-label], td, option, label, button")].map(
    e => e.getAttribute("aria-label") ?? e.textContent));
  for (const svg of document.querySelectorAll("figure.chart svg.marks")) {
    const marks = [...svg.querySelectorAll(".role-mark > *")], step = Math.ceil(marks.length / most);
    const boxes = marks.filter((_, i) => i % step === 0).map(mark => mark.getBoundingClientRect());
    for (const {x, y, width, height} of boxes)
      for (const part of width + height ? [.5, .1, .9] : []) {
        const at = {clientX: x + part * width, clientY: y + part * height, bubbles: true};
        for (const kind of ["pointermove", "mousemove"])
          document.elementFromPoint(at.clientX, at.clientY)?.dispatchEvent(new PointerEvent(kind, at));
        found.add("under the mouse: " + (document.querySelector("#vg-tooltip-element.visible")?.innerText ?? ""));
      }
  }
  return [...found];
}"""
BLURRED = """() => {
  const e = document.activeElement, {outlineStyle, outlineWidth} = getComputedStyle(e);
  const is_seen = e === document.body || outlineStyle !== "none" && parseFloat(outlineWidth) >= 1;
  return is_seen ? "" : e.outerHTML.slice(0, 90);
}"""
DRAWN = '[...document.querySelectorAll("figure.chart")].every(f => f.querySelector(".drawing svg"))'

DOTS = ".points_marks path"


def use_every_control(page: Any) -> None:
    """Choose, tick and click in each control and figure."""
    for select in page.locator("figure.chart .vega-bind select").all():
        for choice in (
            select.locator("option").count() - 1,
            0,
        ):  # all at once would leave no plan to hover
            select.select_option(index=choice)
    for box in page.locator("figure.chart .vega-bind input").all():
        box.fill(box.get_attribute("max")) if box.get_attribute("type") == "range" else box.click()
    for button in page.locator("figure.chart button").all():
        button.click()
    for drawing in page.locator("figure.chart svg.marks").all():
        size = drawing.bounding_box()
        for x, y in itertools.product(range(1, 5), repeat=2):
            drawing.click(position={"x": size["width"] * x / 5, "y": size["height"] * y / 5})
    page.mouse.move(0, 0)  # away from what shows a value under the mouse


def words(page: Any) -> list[str]:
    """What drawings, tables and controls say, and what they say under the mouse."""
    page.evaluate("scrollTo(0, 0)")
    return page.evaluate(WORDS, 300)


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    """A page that records what a report must not do: errors, and requests to anywhere."""
    made = browser.new_page()
    made.wrong = []
    made.on("console", lambda message: made.wrong.append(message.text))
    made.on("pageerror", lambda error: made.wrong.append(str(error)))
    made.on(
        "request",
        lambda r: r.url.startswith(("file:", "data:", "blob:")) or made.wrong.append(r.url),
    )
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
        page.set_viewport_size(
            {"width": 1280, "height": page.evaluate("document.body.scrollHeight")}
        )
        found[f"contrast, {scheme}"] = page.evaluate(CONTRAST, [AA, AA_LARGE])
    looks = {"white in the dark": GLARING, "no text": SILENT, "covered": COVERED}
    found |= {name: page.evaluate(look) for name, look in looks.items()}
    for _ in range(20):
        page.keyboard.press("Tab")
        found.setdefault("focus not seen", []).extend(filter(None, [page.evaluate(BLURRED)]))
    found["small letters"] = page.evaluate(SMALL, [LEAST, POINTS])
    found["no value"] = [text for text in words(page) if NO_VALUE.search(text)]
    page.set_viewport_size({"width": NARROW, "height": 800})
    page.wait_for_timeout(50)  # figures are drawn anew
    page.wait_for_function(DRAWN)
    wide = page.evaluate("document.documentElement.scrollWidth")
    found["wider than a telephone"] = [wide] if wide > NARROW else []
    found["unmarked on a telephone"] = page.evaluate(UNMARKED)
    found["small letters on a telephone"] = page.evaluate(SMALL, [LEAST, POINTS])
    page.emulate_media(media="print", color_scheme="light")
    paper = SIGNED if page.evaluate("getComputedStyle(document.body).page") == "sheet" else PAPER
    page.set_viewport_size({"width": paper, "height": 1000})
    return {**found, "cut on paper": page.evaluate(CUT, [paper, SHEET])}


def test_every_page_of_a_study_can_be_read(demo: Path, big: Path, page: Any):
    pages = [path for study in (demo, big) for path in sorted(study.glob("*.html"))]
    assert (
        " ".join(path.stem.partition("_")[0] for path in pages)
        == "01 02 03 04 index 01 02 04 05 06 07 08 index"
    )
    found = {
        (path.parent.name, path.stem, what): texts
        for path in pages
        for what, texts in wrong(page, path).items()
    }
    assert not {which: texts for which, texts in found.items() if texts}
    assert not page.wrong


@pytest.fixture(scope="module")
def explorer(demo: Path, page: Any) -> Any:
    """The explorer of 02 on a screen of 1440 x 900."""
    page.emulate_media(media="screen", color_scheme="light")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto((demo / "02_topology.html").as_uri())
    page.wait_for_function(DRAWN)
    return page.locator("figure.chart").first


def shown(figure: Any) -> list[str]:
    """The ids of the picked plan and of the two pins."""
    selects = [figure.locator(f"select[name={name}]") for name in ("plan_key", "a", "b")]
    return [select.input_value().rpartition("(")[2].rstrip(")") for select in selects]


def test_keys_walk_all_plans_pin_two_and_zoom_the_schedule(explorer: Any, page: Any):
    ticks = explorer.locator(".schedule_group .role-axis-label text")
    whole = {*ticks.all_text_contents()}
    explorer.locator("svg.marks").focus()
    page.keyboard.press("+")
    page.keyboard.press("+")
    page.wait_for_timeout(300)  # it is drawn after the key
    assert {*ticks.all_text_contents()} != whole
    explorer.get_by_text("Whole", exact=True).click()
    page.wait_for_timeout(300)
    assert {*ticks.all_text_contents()} == whole
    explorer.locator("svg.marks").focus()
    seen = []
    for _ in range(explorer.locator(DOTS).count()):
        page.keyboard.press("ArrowRight")
        seen.append(shown(explorer)[0])
    assert len({*seen}) == len(seen)
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("b")
    page.wait_for_timeout(300)
    assert shown(explorer) == [seen[-2], seen[-1], seen[-2]]
    words = explorer.locator("svg.marks").text_content()
    assert words.count(seen[-1]) == 1 and words.count(seen[-2]) == 2, (
        "their numbers stand side by side"
    )
