"""Write lib/trilane/data/calibrations.json from the shipped measured rows: python benchmarks/fit_calibrations.py"""

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

from trilane.costmodel.backtest import calibrate_memory, calibrate_time
from trilane.costmodel.calibration import Calibration, shipped_regimes, to_json
from trilane.costmodel.measured_rows import MeasuredRow, read_rows

DATA = Path(str(resources.files("trilane").joinpath("data")))
# What an A100 and a V100 stack agree on travels to a cluster nobody has measured; waits and network shares of a
# well-kept system (Megatron-LM on InfiniBand) are assumed, not fitted, and so is the node bus: nccl-tests' all-reduce
# reaches about 230 of NVLink 3's 300 GB/s, and the fit of one cluster trades it against the wait for the last rank. An
# H100 does not hold its boost clock in long matmuls: cuBLAS is seen at 600-720 of 989 TFLOP/s.
WAITS = {"launch_s": 3e-4, "skew_s": 1e-4, "handoff_s": 5e-4, "network": 0.6, "p2p": 0.6, "node": 0.77}
HOPPER_MATMUL = 0.68
# Stacks of the H100's age reduce gradients, gather weights and hand activations on while they compute.
HOPPER_OVERLAP = 0.6


def fitted(rows: list[MeasuredRow], cluster: str, stack: str) -> Calibration:
    """The fit of the rows of one GPU family and software stack."""
    family = cluster.split("-")[1]
    chosen = [r for r in rows if family in r.case.cluster.name and r.stack == stack]
    return calibrate_time(chosen, replace(Calibration(), regimes=shipped_regimes(cluster)))


def main() -> None:
    """Fit, then write."""
    rows, skipped = read_rows(DATA / "scored.csv")
    assert not skipped, skipped
    a100 = fitted(rows, "jz-a100-80g", "megatron-deepspeed")
    v100 = fitted(rows, "jz-v100-32g", "megatron-deepspeed")
    old = fitted(rows, "jz-v100-32g", "megatron-lm")
    zero = fitted(rows, "jz-v100-32g", "deepspeed-zero")
    travels = replace(a100, **WAITS, regimes=(), half_width=0.15, rows=0)
    found = {"jz-a100-80g": a100}
    for name in ("jz-v100-32g", "jz-v100-16g"):
        found |= {name: v100, f"{name}/megatron-lm": old, f"{name}/deepspeed-zero": zero}
    found |= {"transferable": travels, "hopper": replace(travels, matmul=HOPPER_MATMUL, overlap=HOPPER_OVERLAP)}
    text = json.dumps({name: to_json(c) for name, c in found.items()}, indent=1)
    (DATA / "calibrations.json").write_text(text + "\n", encoding="utf-8")
    for name, calibration in found.items():
        print(name, calibration)
    print(calibrate_memory([r for r in rows if r.stack == "megatron-deepspeed"]))


if __name__ == "__main__":
    main()
