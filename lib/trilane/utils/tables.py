"""Tables and sentences that a notebook shows: results have `to_frame()`, and show themselves."""

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pandas import DataFrame
    from pandas.io.formats.style import Styler
else:
    DataFrame = Any  # a name for annotations: pandas takes half a second to import


T = TypeVar("T")
K = TypeVar("K")
LONG = 44  # characters: a longer text may wrap
# Escape sequences (ECMA-48, 5.4 and 5.6), then what alone moves the cursor, reorders a line or cannot be encoded.
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?)")
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)


class Table:
    """A result that a notebook shows as a table, floats with at most `digits` decimals, of `to_frame()`."""

    digits: int = 3

    def to_frame(self) -> DataFrame:
        """The table as a DataFrame, with columns named for display."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return show(self.to_frame(), self.digits).to_html()


@dataclass(frozen=True)
class Columns(Table):
    """A table of named columns of equal length; floats get at most `digits` decimals."""

    columns: Mapping[str, Sequence[Any]]
    digits: int = 3

    @classmethod
    def of_rows(cls, names: Sequence[str], rows: Sequence[Sequence[Any]], digits: int = 3) -> "Columns":
        """The table of these rows, each with a value for every name."""
        return cls({name: [row[n] for row in rows] for n, name in enumerate(names)}, digits)

    def to_frame(self) -> DataFrame:
        import pandas as pd

        return pd.DataFrame(self.columns)


class Text(str):
    """Markdown that a notebook shows as text; insert text from files with `literal`."""

    def _repr_markdown_(self) -> str:
        return str(self)


class Html(str):
    """HTML that a notebook shows; insert text from files escaped, as `Html.pre` does."""

    def _repr_html_(self) -> str:
        return str(self)

    @classmethod
    def pre(cls, text: str) -> "Html":
        """`text` as it is, in a fixed-width font."""
        return cls(f"<pre>{html.escape(printable(text))}</pre>")


def printable(text: str) -> str:
    """`text`, which may come from a file, for a terminal: without escape sequences, control and bidirectional marks.

    Line ends and tabs stay; other control characters become blanks.
    """
    return text if text.isprintable() else CONTROL.sub(" ", SEQUENCE.sub("", text))


def one_line(text: str) -> str:
    """`text` as printable() gives it, its line ends replaced by blanks."""
    return " ".join(printable(text).split("\n"))


def literal(text: object) -> str:
    """External text (a log, a dump, a file name) as Markdown without markup."""
    escaped = html.escape(" ".join(printable(str(text)).split()))
    return re.sub(r"([\\`*_{}\[\]()#+!|~$-])", r"\\\1", escaped)


def show(columns: Any, digits: int = 3) -> "Styler":
    """Named columns (a mapping or a DataFrame) as a table for a notebook and its HTML.

    Each column of floats gets as many decimals as it needs, at most `digits`.
    """
    import pandas as pd

    frame = pd.DataFrame(columns)
    floats = frame.select_dtypes("float")
    needed = {name: _decimals(floats[name].dropna(), digits) for name in floats}
    text = [name for name in frame if not pd.api.types.is_numeric_dtype(frame[name])]
    long = [name for name in text if frame[name].astype(str).str.len().max() > LONG]
    left = {name: [{"selector": "th", "props": [("text-align", "left")]}] for name in text}
    return (
        frame.style.hide(axis="index")
        .format({name: f"{{:,.{d}f}}" for name, d in needed.items()}, na_rep="", escape="html")
        .set_properties(subset=text, **{"text-align": "left"})
        .set_properties(subset=long, **{"white-space": "normal", "min-width": "18rem"})
        .set_table_styles(left)
        .set_table_attributes('class="dataframe"')
    )


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their key, in the order in which they come."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def short(text: str, most: int = 110) -> str:
    """The text as one line of at most `most` characters, with single blanks."""
    line = " ".join(printable(text).split())
    cut = line[: most - 1].rpartition(" ")[0] or line[: most - 2]
    return line if len(line) <= most else f"{cut} …"


def middle(text: str, most: int = 38) -> str:
    """A name in at most `most` characters: its middle is left out."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"


def percent(value: float, digits: int = 1) -> str:
    """A share as a percentage, empty for NaN."""
    return f"{value:.{digits}%}" if value == value else ""


def _decimals(values: Any, most: int) -> int:
    return next((d for d in range(most) if (values.round(d) == values.round(most)).all()), most)
