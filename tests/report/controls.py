"""The controls that a notebook or a report shows in a browser, all used once."""

from typing import Any


def use_every_control(page: Any, shown: str) -> int:
    """Choose, type and click in each control and figure within `shown`, a CSS selector; how many there were."""
    kinds = {
        ".widget-dropdown select, .vega-bind select": lambda c: c.select_option(index=c.locator("option").count() - 1),
        ".widget-checkbox input, .vega-bind input[type=checkbox]": lambda c: c.click(),
        ".widget-text input": lambda c: (c.fill("2"), c.press("Enter")),
        ".vega-bind input[type=range]": lambda c: c.press("ArrowRight"),
        ".vega-bind input[type=radio]": lambda c: c.click(),
        ".vega-embed canvas, .vega-embed svg.marks": lambda c: [c.click(position=spot) for spot in spots(c)],
        "button.jupyter-button": lambda c: c.click(),
    }
    used = 0
    for kind, use in kinds.items():
        for control in page.locator(", ".join(f"{shown} {part}" for part in kind.split(", "))).all():
            control.scroll_into_view_if_needed()
            use(control)
            used += 1
    page.mouse.move(0, 0)  # away from what shows a value under the mouse
    return used


MARKS = """() => [...document.querySelectorAll("figure.chart svg.marks .role-mark > *")].map(mark => {
  const {x, y, width, height} = mark.getBoundingClientRect();
  return [x + scrollX + width / 2, y + scrollY + height / 2, width + height];
}).filter(([x, y, size]) => size > 0).map(([x, y]) => [x, y])"""
TOOLTIP = "document.querySelector('#vg-tooltip-element.visible')?.innerText ?? ''"


def tooltips(page: Any, most: int = 300) -> set[str]:
    """The texts under the mouse over the middles of the drawn marks, of at most about `most` on a page."""
    before, found = page.viewport_size, set()
    page.set_viewport_size({"width": before["width"], "height": page.evaluate("document.body.scrollHeight")})
    page.evaluate("scrollTo(0, 0)")
    places = page.evaluate(MARKS)
    for x, y in places[:: max(1, len(places) // most)]:
        page.mouse.move(x, y)
        found.add(page.evaluate(TOOLTIP))
    page.set_viewport_size(before)
    return found - {""}


def spots(figure: Any) -> list[dict[str, float]]:
    """Places all over a figure."""
    box = figure.bounding_box()
    return [{"x": box["width"] * x / 5, "y": box["height"] * y / 5} for x in range(1, 5) for y in range(1, 5)]
