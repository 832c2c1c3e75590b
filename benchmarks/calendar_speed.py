"""How fast the calendar simulates: python benchmarks/calendar_speed.py

10,000 runs of one year each: 384 A100s, a ramp of 116 batch sizes, four kinds of stops.
"""

import time
from datetime import date

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel import shipped
from trilane.forecasting.forecast import forecast

TOPOLOGY = Topology(
    tp=4,
    pp=12,
    dp=8,
    mbs=2,
    gbs=2048,
    zero=1,
    recompute="full",
    precision="bf16",
    partition="type:transformer|embedding",
)


def main() -> None:
    """Print the days of the median run and the seconds that 10,000 of them take."""
    machine, start = cluster("jz-a100-80g"), date(2027, 1, 1)
    plan = Plan(
        label="year",
        shape=parse_shape("70,14336,112,2048,250880"),
        cluster=machine,
        topology=TOPOLOGY,
    )
    asked = {
        "calibration": shipped.default(machine),
        "tokens": 1.18e12,
        "ramp": "192,16,9765625",
        "start": start,
    }
    begin, cpu = time.perf_counter(), time.process_time()
    found = forecast(plan, **asked, runs=10_000)
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    print(f"10,000 runs of {found.days(0.5):.0f} days in {wall:.2f} s ({cpu:.2f} s of one core)")


if __name__ == "__main__":
    main()
