"""Values of files become Markdown and HTML that show them, and nothing else."""

import json

import mistune
import pytest
from markup import HOSTILE, Page, words

from trilane.utils.numbers import amount, with_bounds
from trilane.utils.tables import (
    Columns,
    Html,
    Text,
    printable,
    show,
)


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("template", ["{}", "{} and more", "**{}**: {:code}"])
def test_a_value_in_markdown_is_its_text(value: str, template: str):
    """CommonMark 0.31, section 2.4. The renderer takes raw HTML and what GitHub's Markdown and
    Jupyter's add.
    """
    renderer = mistune.create_markdown(
        escape=False, plugins=["table", "url", "strikethrough", "footnotes", "math"]
    )
    source = Text.of(template, value, value)
    page, plain = Page(str(renderer(source))), Page(str(renderer(Text.of(template, "v", "v"))))
    assert set(page.tags) <= set(plain.tags), source
    assert words(page.text) == words(plain.text.replace("v", words(value)))
    assert not page.attributes


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_in_html_is_its_text(value: str):
    page = Page(Html.of("<i title='{}'>{}</i>{:code}", value, value, value) + Html.pre(value))
    assert (
        page.tags == ["i", "code", "pre"]
        and page.attributes == ["title"]
        and page.text == value * 3
    )
    table = Page(show({value: [value, value], "n": [1, 2]}))
    tags = ["table", "thead", "tr", "th", "tbody", "td"]
    assert table.tags.count("td") == 4 and {*table.tags} - {"wbr"} == {*tags}
    assert set(table.attributes) <= {"class", "style"}
    assert words(table.text).count(words(value)) >= 3
    link = Html.link(value, value, f"{value}.html")
    assert Page(link).tags == ["a"] and Page(link).text == value
    assert not set(':"<>&?# ') & set(link.split('"')[1]), "a path below the page's folder"


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ((103.27, 97.162, 109.83), "103.3 (97.2 to 109.8)"),
        ((1021824.0, 945006.0, 1122575.0), "1,022,000 (945,000 to 1,123,000)"),
        ((0.0, 0.0, 0.0), "0 (0 to 0)"),
        ((9999.6,), "10,000"),
    ],
)
def test_a_number_has_the_digits_that_its_interval_lets_one_know(numbers: tuple, shown: str):
    assert (with_bounds(*numbers) if len(numbers) > 1 else amount(*numbers)) == shown


@pytest.mark.parametrize(
    "value", ["\x1b[31mred\x1b[0m", "a\x00b", "\u202eevil", "\ud800", "\x1b]8;;http://x\x07y"]
)
def test_what_controls_a_terminal_or_cannot_be_written_is_left_out(value: str):
    shown = [
        str(Text.of("{}", value)),
        str(Html.pre(value)),
        Columns({value: [value]})._repr_html_(),
    ]
    for text in shown:
        assert text.encode() is not None and text == printable(text)
        assert json.loads(json.dumps(text)) == text
