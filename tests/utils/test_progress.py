"""Progress shows what is left of long work, to a person alone."""

import io
import sys
from typing import Any

import pytest

from trilane.utils import progress as module
from trilane.utils.numbers import duration
from trilane.utils.progress import progress


class Terminal(io.StringIO):
    """A terminal that remembers what it was sent."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each item takes a second."""
    seconds = iter(range(1000))
    monkeypatch.delenv("TRILANE_BATCH", raising=False)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(seconds))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook displays, each state of it."""
    found: list[str] = []

    class Handle:
        def update(self, html: Any) -> None:
            found.append(html.data)

    def display(html: Any, display_id: bool) -> Handle:
        found.append(html.data)
        return Handle()

    monkeypatch.setattr(module, "in_kernel", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    return found


def test_a_notebook_shows_what_remains_and_keeps_no_bar(clock: None, shown: list[str]) -> None:
    assert list(progress("abcdef", "logs", "log")) == list("abcdef")
    assert "logs: 2 of 6 logs, about 6 s left" in shown[0] and "logs: 5 of 6 logs, about 1 s left" in shown[3]
    assert len(shown) == 5 and shown[-1] == ""


def test_short_work_and_a_batch_run_show_nothing(
    clock: None, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(progress("ab", "logs", "log")) == ["a", "b"]
    monkeypatch.setenv("TRILANE_BATCH", "1")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(progress("abcdef", "logs", "log")) == list("abcdef")
    assert shown == [] and sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_a_terminal_gets_a_bar_once_the_work_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRILANE_BATCH", raising=False)
    for late, is_shown in ((0.0, True), (60.0, False)):
        monkeypatch.setattr(module, "LATE_S", late)
        monkeypatch.setattr(sys, "stderr", Terminal())
        assert list(progress("abc", "search", "size")) == list("abc")
        assert ("search:" in sys.stderr.getvalue()) == is_shown  # type: ignore[attr-defined]


@pytest.mark.parametrize(("seconds", "words"), [(8.4, "8 s"), (720, "12 min"), (9000, "2.5 h"), (181440, "2.1 days")])
def test_a_time_is_in_a_person_s_unit(seconds: float, words: str) -> None:
    assert duration(seconds) == words
