"""Plans, forecasts or runs side by side: the numbers that differ."""

from pathlib import Path
from typing import Any

from trilane.analysis.collect import measure_path
from trilane.analysis.measure import Measurement
from trilane.config.plan import Plan, read_plan
from trilane.costmodel.predict import predict
from trilane.forecasting.forecast import Forecast
from trilane.planning.search_result import Candidate, plan_columns
from trilane.utils.tables import Columns
from trilane.utils.validation import require


def compare(*things: Any) -> Columns:
    """Two or more plans, plans of a search, forecasts or runs (also by their paths): a row for each
    number that differs.

        compare(plan, plan.replace(mbs=1))
    """
    require(len(things) > 1, "compare", len(things), "takes two plans, forecasts or runs, or more")
    numbers = [_numbers(thing) for thing in things]
    rows = []
    for name in {name: None for each in numbers for name in each}:
        values = [each.get(name) for each in numbers]
        if len({str(value) for value in values}) > 1:
            rows.append([name, *values])
    return Columns.of_rows(["", *[f"{n}" for n in range(1, len(things) + 1)]], rows)


def _numbers(thing: Any) -> dict[str, Any]:
    """The numbers of one of them by name."""
    if isinstance(thing, str | Path):
        is_plan = Path(thing).suffix == ".json"
        thing = read_plan(thing) if is_plan else measure_path(thing)[0]
    match thing:
        case Forecast():
            return {"plan": thing.request.plan.label, **thing.figures()}
        case Measurement():
            return {"run": thing.name, **thing.row()}
        case Candidate():
            return plan_columns(thing.plan, thing.prediction)
        case Plan():
            return plan_columns(thing, predict(thing))
    raise ValueError(f"compare={type(thing).__name__}: must be plans, forecasts or runs")
