"""Logs, dumps, traces, checkpoints, corpora and tokenizers that are damaged or meant to harm: a result or one line."""

import re

import pytest

from trilane.utils.tables import Text, one_line, printable, short

# What moves the cursor, rewrites the window's title or reorders a line (Trojan Source, CVE-2021-42574).
CONTROLS = {
    "colour": ("\x1b[31mred\x1b[0m", "red"),
    "title": ("a\x1b]0;rm -rf ~\x07b", "ab"),
    "title without an end": ("a\x1b]0;gone", "a"),
    "device control": ("a\x1bP1$r\x1b\\b", "ab"),
    "clear screen": ("a\x1b[2J\x1b[Hb", "ab"),
    "8-bit escapes": ("a\x9b2Jb", "a 2Jb"),
    "backspaces": ("safe\b\b\b\bevil", "safe    evil"),
    "carriage return": ("evil\rsafe", "evil safe"),
    "right-to-left": ("a\u202eb\u2066c\u200f", "a b c "),
    "line separator": ("a\u2028b\x85c", "a b c"),
    "invisible": ("a\u200bb\ufeffc", "a b c"),
    "tags": ("a\U000e0041b", "a b"),
    "half a character": ("a\udc80b", "a b"),
    "NUL": ("a\0b", "a b"),
}


@pytest.mark.parametrize(("text", "shown"), CONTROLS.values(), ids=CONTROLS)
def test_text_of_a_file_controls_no_terminal(text: str, shown: str) -> None:
    """ECMA-48, 5.4 and 5.6; Unicode's bidirectional marks."""
    assert printable(text) == shown
    assert all(one(text).isprintable() for one in (one_line, short, Text.escape))


def test_plain_text_stays_as_it_is() -> None:
    text = "Übertragung\tvon 3 µs – 日本語 🙂\nzweite Zeile a\xa0b"
    assert printable(text) == text


def test_a_long_text_is_cut_at_a_word_or_inside_one() -> None:
    assert short("aa bb cc", 7) == "aa bb …"
    assert re.fullmatch("x{5} …", short("x" * 10**6, 7))
