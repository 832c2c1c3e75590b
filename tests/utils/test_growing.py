"""Growing: every byte of a file that others write, once, whatever they do to it."""

import os

from trilane.utils import growing
from trilane.utils.growing import Growing


def text(file):
    return b"".join(file.blocks())


def test_only_whole_lines_that_were_added_are_read_and_each_once(tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "BLOCK", 5)
    path = tmp_path / "a.log"
    file = Growing(path)
    assert text(file) == b"", "it may not exist yet"
    path.write_bytes(b"one\ntwo and mo")
    assert (text(file), text(file), file.rest) == (b"one\n", b"", b"two and mo")
    with path.open("ab") as end:
        end.write(b"re\nlast")
    assert (text(file), file.close(), text(file)) == (b"two and more\n", b"last", b"")
    assert file.beginnings == 0


def test_a_truncated_file_is_read_from_its_start_also_where_it_grew_beyond_its_old_length(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"old 1\nold 2\nunfinished")
    file = Growing(path)
    assert text(file) == b"old 1\nold 2\n"
    path.write_bytes(b"new\n")
    assert (text(file), file.beginnings) == (b"unfinished\nnew\n", 1)
    path.write_bytes(b"\0" * 90 + b"longer than it was, as a writer without O_APPEND leaves it\n")
    assert text(file) == b"longer than it was, as a writer without O_APPEND leaves it\n"
    assert file.beginnings == 2


def test_a_rotated_file_is_read_to_its_end_then_its_successor(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"1\n2\n")
    file = Growing(path)
    text(file)
    with path.open("ab") as old:
        old.write(b"3\n")
    os.rename(path, tmp_path / "a.log.1")
    assert text(file) == b"", "between the two"
    path.write_bytes(b"4\n")
    assert (text(file), text(file)) == (b"3\n4\n", b"")


def test_a_line_without_end_takes_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "BLOCK", 10)
    monkeypatch.setattr(growing, "MAX_LINE", 30)
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 95)
    file = Growing(path)
    assert max(map(len, file.blocks())) <= 30 and len(file.rest) < 30
