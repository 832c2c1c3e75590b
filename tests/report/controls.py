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


def spots(figure: Any) -> list[dict[str, float]]:
    """Places all over a figure."""
    box = figure.bounding_box()
    return [{"x": box["width"] * x / 5, "y": box["height"] * y / 5} for x in range(1, 5) for y in range(1, 5)]
