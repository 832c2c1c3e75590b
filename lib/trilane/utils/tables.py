"""Tables and sentences that a notebook shows: results have `to_json()`, `to_frame()` and
`summary()`, and show themselves by these.
"""

import html
import math
import re
import string
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from trilane.utils.masking import masked
from trilane.utils.numbers import amount

if TYPE_CHECKING:
    from pandas import DataFrame
else:
    DataFrame = Any  # a name for annotations: pandas takes half a second to import

Json = dict[str, Any]  # a JSON object
REPR_CHARACTERS = 300  # three lines of a terminal
CELL_CHARACTERS = 1000
T = TypeVar("T")
K = TypeVar("K")


def as_json(value: Any) -> Any:
    """A value as JSON has it; a dataclass is an object of its fields, then of the properties named
    in its DERIVED.

    A number that is not finite is null, a path, date or enumeration text, an array or any other
    sequence a list.
    """
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        names += getattr(value, "DERIVED", ())
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return None
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, Path | date):
        return str(value)
    if isinstance(value, str | int | None):
        return value
    if hasattr(value, "item") and not value.shape:  # a number of numpy
        return as_json(value.item())
    return [as_json(item) for item in value]


def csv_text(table: DataFrame) -> str:
    """A DataFrame as CSV; text that a spreadsheet would run as a formula gets an apostrophe in
    front of it.
    """

    def inert(cell: Any) -> Any:
        if not isinstance(cell, str):
            return cell
        text = printable(cell)  # a bare CR would begin another row
        # OWASP, 'CSV injection': Excel, LibreOffice and Google Sheets take these beginnings for a
        # formula's
        if cell.startswith(tuple("=+-@\t\r")) and not re.fullmatch(r"[+-][\d.]+(e[+-]?\d+)?", cell):
            return f"'{text}"
        return text

    texts = table.select_dtypes(exclude="number").columns
    return table.assign(**{name: table[name].map(inert) for name in texts}).to_csv(index=False)


class Record:
    """A value that shows itself as JSON and as text; its repr() is the text on one line of at most
    300 characters:

    ModelShape(num_layers=70, hidden_size=14336, num_attention_heads=112, seq_length=2048,
    vocab_size=250880)
    """

    DERIVED: ClassVar[tuple[str, ...]] = ()  # properties that its JSON has after the fields

    def __init_subclass__(cls) -> None:
        # in the class itself: @dataclass writes its own repr() over one that is inherited
        cls.__repr__ = Record.__repr__  # type: ignore[method-assign]

    def to_json(self) -> Json:
        """The JSON object of as_json()."""
        return as_json(self)

    def replace(self, **changes: Any) -> Any:
        """The value with other fields."""
        return replace(self, **changes)  # type: ignore[type-var]

    def summary(self) -> str:
        """What tells it from others; of a dataclass the fields that are not at their default."""
        words = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.repr and (field.default is MISSING or value != field.default):
                words.append(f"{field.name}={_in_short(value)}")
        return ", ".join(words)

    def __repr__(self) -> str:
        kind = type(self).__name__
        summary = self.summary()
        if isinstance(summary, Text):  # without its Markdown
            summary = summary.plain
        text = one_line(summary)
        most = REPR_CHARACTERS - len(kind) - 3  # of parentheses and an ellipsis
        if len(text) > most:
            text = f"{text[:most]}…"
        return f"{kind}({text})"


def _in_short(value: Any) -> str:
    """A value in some words: what has a name by that."""
    if is_dataclass(value):
        value = getattr(value, "label", None) or getattr(value, "name", None) or value
    return middle(repr(value), 60)


class Table(Record):
    """A result with a tidy frame, of which a notebook shows the columns `shown` (all where that is
    empty).

    A frame has the names that objects and JSON have: seconds (`sec_per_it`), bytes as GiB
    (`memory_gib`), shares and probabilities from 0 to 1, NaN for what is unknown. Shown are the
    first `most` rows, under the same names.
    """

    most: ClassVar[int] = 40
    shown: ClassVar[str] = ""

    def to_frame(self) -> DataFrame:
        """The tidy frame."""
        raise NotImplementedError

    def view(self) -> DataFrame:
        """What a notebook shows of the frame."""
        return displayed(self.to_frame().head(self.most), self.shown)

    def _repr_html_(self) -> str:
        return show(self.view())


def displayed(frame: DataFrame, names: str = "") -> DataFrame:
    """The columns of a tidy frame that hold anything (of `names`, where given)."""
    chosen = frame[[name for name in names.split() or frame if name in frame]]
    is_empty = (chosen.isna() | (chosen == "")).all()
    return chosen.loc[:, ~is_empty] if len(frame) else chosen


@dataclass(frozen=True)
class Columns(Table):
    """A table of named columns of equal length."""

    columns: Mapping[str, Sequence[Any]]

    @classmethod
    def of_rows(cls, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> "Columns":
        """The table of these rows, each with a value for every name."""
        return cls({name: [row[n] for row in rows] for n, name in enumerate(names)})

    def to_frame(self) -> DataFrame:
        import pandas as pd

        return pd.DataFrame(self.columns)


class Markup(str):
    """Text in a markup language, made of templates of ours and values; a value is text without
    markup.
    """

    escape: ClassVar[Any] = str
    code: ClassVar[Any] = str

    @classmethod
    def of(cls, template: str, *values: object) -> Self:
        """The template filled as str.format does, each value escaped but one of this class;
        `{:code}` is a fixed-width font.
        """
        return cls(_Filling(cls).vformat(template, values, {}))

    @classmethod
    def joined(cls, separator: str, values: Iterable[object]) -> Self:
        """The values with a separator of ours between them."""
        return cls(separator.join(cls.of("{}", value) for value in values))

    def _repr_markdown_(self) -> str:
        return str(self)


class _Filling(string.Formatter):
    def __init__(self, kind: type[Markup]):
        self.kind = kind

    def format_field(self, value: Any, format_spec: str) -> Any:
        if isinstance(value, self.kind):
            return str(value)
        if format_spec == "code":
            return self.kind.code(value)
        text = format(value, format_spec)
        if isinstance(value, int | float):
            return text
        return self.kind.escape(text)


class Text(Markup):
    """Markdown that a notebook shows: `Text.of("**{}** runs of {:code}", 3, name)`."""

    @staticmethod
    def escape(value: object) -> str:
        """The value on one line; what Markdown or HTML could read as markup is escaped."""
        line = html.escape(" ".join(printable(str(value)).split()), quote=False)
        # what Markdown reads anywhere, at the start of a line, and in an address that would become
        # a link
        line = re.sub(r"(?i)[\\`*_{}\[\]()!|~$@]|^[-+=:#]|:(?=//)|(?<=www)\.", r"\\\g<0>", line)
        return re.sub(r"^(\d+)\.(?= |$)", r"\1\\.", line)

    @staticmethod
    def code(value: object) -> str:
        # nothing can be escaped between backticks
        if re.fullmatch(r"[\w.,:;=+*/@%~-]([\w .,:;=+*/@%~-]*[\w.,:;=+*/@%~-])?", str(value)):
            return f"`{value}`"
        return Text.escape(value)

    @property
    def plain(self) -> str:
        """The sentence without markup."""
        unmarked = re.sub(r"\*\*|(?<!\\)`", "", self)
        return html.unescape(re.sub(r"\\(.)", r"\1", unmarked))


class Lines(tuple[str, ...]):
    """Sentences that a notebook shows as a list."""

    def _repr_markdown_(self) -> str:
        return Text.joined("\n", [Text.of("- {}", line) for line in self])


class Html(Markup):
    """HTML that a notebook shows: `Html.of("<b>{}</b>", name)`."""

    @staticmethod
    def escape(value: object) -> str:
        return html.escape(printable(str(value)))

    @staticmethod
    def code(value: object) -> str:
        return f"<code>{Html.escape(value)}</code>"

    @classmethod
    def pre(cls, text: str) -> "Html":
        """`text` as it is, in a fixed-width font."""
        return cls.of("<pre>{}</pre>", text)

    @classmethod
    def link(cls, text: object, *path: str) -> "Html":
        """A link to a file below the page's folder, named by the parts of its path."""
        parts = [urllib.parse.quote(part, safe="", errors="surrogateescape") for part in path]
        return cls.of('<a href="{}">{}</a>', "/".join(parts), text)

    def __html__(self) -> str:  # of templates that escape any other text
        return str(self)

    _repr_html_ = __html__


def printable(text: str) -> str:
    """`text`, which may come from a file, without secrets, escape sequences, control and
    bidirectional marks: those become blanks; line ends and tabs stay. All text of commands and
    reports passes here.
    """
    text = masked(text)
    if text.isprintable():
        return text
    # ECMA-48, 5.4 and 5.6
    plain = re.sub(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?)", "", text)
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in plain)


def one_line(text: str) -> str:
    """`text` as printable() gives it, its line ends replaced by blanks."""
    return " ".join(printable(text).split("\n"))


def show(columns: Any) -> Html:
    """Named columns (a mapping or a DataFrame) as a table for a notebook; a cell of Html stays
    markup.
    """
    import pandas as pd

    texts = pd.DataFrame(columns).map(_cell, na_action="ignore")
    # a head may break behind an underscore, never inside a word
    texts.columns = [Html.escape(name).replace("_", "_<wbr>") for name in texts]
    with pd.option_context("display.max_colwidth", None):
        return Html(texts.to_html(index=False, escape=False, border=0, na_rep=""))


def _cell(value: Any) -> str:
    if isinstance(value, Html):
        return value
    if isinstance(value, float):
        return amount(value)
    if type(value) is int:
        return f"{value:,}"
    return Html.escape(middle(one_line(str(value)), CELL_CHARACTERS))


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their key, in the order in which they come."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def short(text: str, most: int = 110) -> str:
    """The text as one line of at most `most` characters, with single blanks."""
    return middle(" ".join(printable(text).split()), most)


def middle(text: str, most: int = 38) -> str:
    """A name in at most `most` characters: its middle is left out."""
    if len(text) <= most:
        return text
    tail = most - most // 2 - 1
    return f"{text[: most // 2]}…{text[-tail:]}"
