"""Progress shows what is left of long work, to a person alone."""

import io
import sys

import pytest

from trilane.utils.progress import bar, progress


class Terminal(io.StringIO):
    """A terminal that remembers what it was sent."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("late_s", "batch", "is_shown"), [(0, "", True), (60, "", False), (0, "1", False)]
)
def test_a_terminal_gets_a_bar_once_the_work_is_long(
    late_s: int, batch: str, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRILANE_BATCH", batch)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(
        "trilane.utils.progress.bar",
        lambda items, **options: bar(items, **{**options, "delay": late_s}),
    )
    assert list(progress("abc", "search", "size")) == list("abc")
    assert ("search:" in sys.stderr.getvalue()) == is_shown  # type: ignore[attr-defined]
