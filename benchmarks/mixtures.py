"""Mixtures of experts beside public rows: python benchmarks/mixtures.py [ROWS.csv]

No constant is fitted to these rows, so that each source is left out as a whole. Of each source:
how many rows, the median and the 90th percentile of the error, the share inside the 90 % interval
and its median width (high over low). Left out are rows of kinds that a shape does not have (latent
attention, layers of other kinds), and models of a demonstration's size.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from trilane.costmodel.predict import predict

ROWS = Path(__file__).with_name("mixtures.csv")


def errors(path: Path) -> pd.DataFrame:
    """A row a run: its source, the predicted seconds over those measured, and the interval."""
    found = predict(pd.read_csv(path, dtype=str, keep_default_na=False))
    measured = pd.to_numeric(found["sec_per_it"])
    low = found["predicted_sec_lo"]
    high = found["predicted_sec_hi"]
    return pd.DataFrame(
        {
            "source": found["source"].str.partition("@")[0].str.partition("#")[0],
            "section": found["section"],
            "reason": found["reason"],
            "ratio": found["predicted_sec_per_it"] / measured,
            "inside": (low <= measured) & (measured <= high),
            "width": high / low,
        }
    )


def line(name: str, rows: pd.DataFrame) -> str:
    """The figures of some rows."""
    error = (rows["ratio"] - 1).abs()
    median, p90 = np.quantile(error, (0.5, 0.9))
    inside = rows["inside"].mean()
    width = rows["width"].median()
    return (
        f"{name:44} {len(rows):3} rows  median {median:4.0%}  p90 {p90:4.0%}"
        f"  ratio {rows['ratio'].median():.2f}  inside {inside:4.0%}  width {width:.2f}"
    )


def main(path: Path = ROWS) -> None:
    """Print the table."""
    found = errors(path)
    for reason, rows in found[found["reason"] != ""].groupby("reason"):
        print(f"{len(rows)} not read: {reason}")
    found = found[found["reason"] == ""]
    for source, rows in found.groupby("source"):
        print(line(str(source), rows))
    print(line("all", found))
    small = found["section"] == "Megatron-LM MoE tests"
    print(line("without demonstrations", found[~small]))
    print(line("and without awslabs", found[~small & ~found["source"].str.startswith("awslabs")]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
