"""Arithmetic and sizes in prose are checked within the digits given, and nothing else in it is taken for them."""

import pytest

from trilane.documents.lint.statement_rules import stated

WRONG = [
    ("so 105/35=3 PP stages per gpu: `6*7.3` = ~33.9GB of weights", "product", "43.8GB"),
    ("`12*2*4=384` (`PP*MBS*DP`)", "product", "96"),
    ("8 x 80 = 320GB", "product", "640GB"),
    ("2 * (3 + 4) = 12.5", "product", "14"),
    ("14336 = 2**11*6", "product", "12288"),
    ("a share of 0.75/(7+0.75) = 9.2%", "product", "9.677%"),
    ("1,024 × 8 = 9,192 tokens", "product", "8192"),
    ("4 x 80GB = 300GB", "product", "320GB"),
    ("16 nodes * 8 GPUs = 120 GPUs", "product", "128"),
    ("40GB + 8GB = 52 GB", "product", "48GB"),
    ("1.5TB / 8 = 287GB", "product", "192GB"),
    ("120 / 7 ≈ 25 days", "product", "17.14days"),
    ("emb size: 617.56M/11116.04GB, per gpu 77.19M/1389.51GB", "unit", "11116.04MB"),
    ("17_157_252_600 bytes (12GB)", "unit", "17.16GB"),
    ("a file of 38.2 GB (38.2 MB)", "unit", "38200MB"),
]


@pytest.mark.parametrize(("text", "rule", "likely"), WRONG)
def test_a_statement_that_is_wrong_is_found_with_its_value(text: str, rule: str, likely: str) -> None:
    found = list(stated(7, text, fenced=False))
    assert (found[0].line, found[0].rule, found[0].likely) == (7, rule, likely)


RIGHT = [
    *("`50257*11600` = 582_981_200 / 4 (TP=4) => 145_745_300", "78/12=6.5 - so the last stage", "80/12 = 6 stages"),
    *("so `96/16=6` PP stages per gpu: `6*7.3` ~44GB", "2 * 2 = 4 * 1", "2 x 3.3 = 7", "8*7.3 = 58.3GB", "4*1.1M = 5M"),
    *(
        "64*1024 = 64K",
        "3600 * 24 = 1 day",
        "228.09/989.4 = 23%",
        "1190=60*20-10",
        "0.5 + 0.25 = 0.75",
        "2**30 = 1.07B",
    ),
    *(
        "4 * 1 * 32768 * 128256 /  2**30 = 15.7GiB",
        "13824 = 2**9*3**3",
        "L * 4 * 2 = 8 * L",
        "108*8*c = 864*c",
        "a4*2 = 9",
    ),
    *("17_157_252_600 bytes (17GB)", "81920 MB (80GB)", "a node of 2TB (500GB each)", "a 32GB (40GB) card", "7B/140GB"),
    *(
        "2023-01-02 = 3",
        "3.5/4.0=no",
        "hidden of 1024*14",
        "torch 1.2/1.3 = torch",
        "pages 3-4 = 5",
        "TP=4/PP=24 @ 80GB",
    ),
    *(
        "https://x.org/a?2*2=5",
        "[a](b/2*2=5)",
        "$2*2=5$",
        "/runs/2*3=9/x",
        "2 - 3 = 5",
        "1/0 = 3",
        "v1.5*2=4.1.1",
        "2*3=6.1.2",
    ),
    *(
        "f(2*3)=7",
        "x[2*3]=7",
        "2*3 = 7(a)",
        "2*3 = 7*n",
        "8x7B = 56",
        "2*x*3 = 12",
        "1e-3*2=0.002",
        "9**9**9 = 1",
        "2*3 = 1e999",
    ),
]


@pytest.mark.parametrize("text", RIGHT)
def test_what_is_right_or_no_arithmetic_is_left_alone(text: str) -> None:
    assert list(stated(1, text, fenced=False)) == []


def test_a_fenced_block_is_code_of_which_only_sizes_in_two_units_are_read() -> None:
    assert not list(stated(1, "print(2*3 == 7); 2 * 3 = 7", fenced=True))
    assert [f.rule for f in stated(1, "emb size: 617.56M/11116.04GB", fenced=True)] == ["unit"]


@pytest.mark.parametrize(
    "part", ["1", "2*", "1,111", "(", "1*1=", "1 ", "1x", "1/", "<", "$1", "1_", "1GB (", "1M/1", "1.1"]
)
def test_long_lines_of_anything_are_read_in_no_time(part: str) -> None:
    """A quadratic regular expression would take minutes."""
    assert not list(stated(1, part * 2_000_000, fenced=False))
