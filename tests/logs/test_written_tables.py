"""Tables that people typed: the cells of Markdown and CSV."""

import pytest

from trilane.logs.written_tables import tables

TABLE = """# Runs

| tp | pp | sec_per_it |
|---:|---:|-----------:|
|  8 |  6 |     121.48 |
|  8 |  1 |            |

"""


def test_a_table_has_its_head_and_its_rows_with_the_numbers_of_their_lines():
    rows = [(5, ["8", "6", "121.48"]), (6, ["8", "1", ""])]
    head = ["tp", "pp", "sec_per_it"]
    assert tables(TABLE.splitlines(), ".md") == [(head, rows)]
    text = "# of a cluster\ntp,pp,sec_per_it\n8,6,121.48\n"
    assert tables(text.splitlines(), ".csv") == [(head, [(3, ["8", "6", "121.48"])])]


def test_a_cell_without_an_end_is_refused():
    with pytest.raises(ValueError, match=r"^table=.*: is no CSV"):
        tables(["tp,sec_per_it", "8," + "1" * 200_000], ".csv")
