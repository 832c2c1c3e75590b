"""Write lib/trilane/data/calibrations.json from the shipped measured rows: python benchmarks/fit_calibrations.py"""

import json
from importlib import resources
from pathlib import Path

from trilane.costmodel.calibration import to_json
from trilane.costmodel.fit import fit_time
from trilane.costmodel.measured_rows import MeasuredRow, every_row, usable
from trilane.costmodel.metrics import calibrate_memory
from trilane.costmodel.shipped import prior_of

DATA = Path(str(resources.files("trilane").joinpath("data")))
# The stack of a cluster's rows that a plan for it rests on, if it names none.
USUAL = {"jz-a100-80g": "megatron-deepspeed", "dgx-h100": "megatron-core"}
USUAL |= {"jz-v100-32g": "megatron-deepspeed"}


def main() -> None:
    """Fit each cluster and stack, from the priors and what the stack is known to do; then write."""
    groups: dict[str, list[MeasuredRow]] = {}
    for row in every_row():  # V100 cards of 16 and 32 GB stand in nodes of one kind
        cluster = row.case.cluster.name.replace("jz-v100-16g", "jz-v100-32g")
        groups.setdefault(f"{cluster}/{row.stack}", []).append(row)
    fitted = {}
    for name, rows in groups.items():
        cluster, _, stack = name.partition("/")
        timed = usable(rows)
        prior = prior_of(cluster, stack)
        fitted[name] = fit_time([r.case for r in timed], [r.seconds for r in timed], prior)
    plain = {cluster: fitted[f"{cluster}/{stack}"] for cluster, stack in USUAL.items()}
    found = {**plain, **fitted}
    text = json.dumps({name: to_json(c) for name, c in found.items()}, indent=1)
    (DATA / "calibrations.json").write_text(text + "\n", encoding="utf-8")
    for name, calibration in found.items():
        print(name, calibration)
    print(calibrate_memory([r for r in every_row() if r.stack == "megatron-deepspeed"]))


if __name__ == "__main__":
    main()
