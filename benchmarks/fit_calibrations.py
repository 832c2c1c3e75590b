"""Write lib/trilane/data/calibrations.json from the shipped measured rows: python benchmarks/fit_calibrations.py"""

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

from trilane.costmodel.calibration import to_json
from trilane.costmodel.measured_rows import MeasuredRow, every_row
from trilane.costmodel.metrics import calibrate_memory, calibrate_time
from trilane.costmodel.shipped import prior_of

DATA = Path(str(resources.files("trilane").joinpath("data")))
# The stack of a cluster's rows that a plan for it rests on, if it names none.
USUAL = {"jz-a100-80g": "megatron-deepspeed", "dgx-h100": "megatron-core"}
USUAL |= {"jz-v100-32g": "megatron-deepspeed", "jz-v100-16g": "megatron-deepspeed"}
# What an A100 and a V100 stack agree on travels to a cluster nobody has measured; waits and network shares of a
# well-kept system (Megatron-LM on InfiniBand) are assumed, not fitted, and so is the node bus: nccl-tests' all-reduce
# reaches about 230 of NVLink 3's 300 GB/s, and the fit of one cluster trades it against the wait for the last rank.
WAITS = {"launch_s": 3e-4, "skew_s": 1e-4, "handoff_s": 5e-4, "network": 0.6, "p2p": 0.6, "node": 0.77}
WAITS |= {"exposed": 1.0, "passes": 1.0}
# Largest shares of the peak found in bf16: 0.869 on an A100 SXM, 0.803 on an H100 SXM (S. Bekman, 'Machine Learning
# Engineering', table of maximum achievable matmul FLOPS). An H100's fit gets the same share of the A100's.
HOPPER_MATMUL = 0.803 / 0.869
# Stacks of the H100's age reduce gradients, gather weights and hand activations on while they compute.
HOPPER_OVERLAP = 0.6


def main() -> None:
    """Fit each cluster and stack, from the priors and what the stack is known to do; then write."""
    groups: dict[str, list[MeasuredRow]] = {}
    for row in every_row():  # V100 cards of 16 and 32 GB stand in nodes of one kind
        cluster = row.case.cluster.name.replace("jz-v100-16g", "jz-v100-32g")
        groups.setdefault(f"{cluster}/{row.stack}", []).append(row)
    fitted = {}
    for name, rows in groups.items():
        cluster, _, stack = name.partition("/")
        fitted[name] = calibrate_time(rows, prior_of(cluster, stack))
    fitted |= {name.replace("32g", "16g"): k for name, k in fitted.items() if name.startswith("jz-v100-32g")}
    a100 = fitted["jz-a100-80g/megatron-deepspeed"]
    travels = replace(a100, **WAITS, regimes=(), half_width=0.15, rows=0, stack="")
    hopper = replace(travels, matmul=a100.matmul * HOPPER_MATMUL, overlap=HOPPER_OVERLAP, exposed=1 - HOPPER_OVERLAP)
    plain = {cluster: fitted[f"{cluster}/{stack}"] for cluster, stack in USUAL.items()}
    found = {**plain, **fitted, "transferable": travels, "hopper": hopper}
    text = json.dumps({name: to_json(c) for name, c in found.items()}, indent=1)
    (DATA / "calibrations.json").write_text(text + "\n", encoding="utf-8")
    for name, calibration in found.items():
        print(name, calibration)
    print(calibrate_memory([r for r in every_row() if r.stack == "megatron-deepspeed"]))


if __name__ == "__main__":
    main()
