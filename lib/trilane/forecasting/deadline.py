"""From a deadline to a size: the largest shapes that a number of GPUs trains on given tokens within so many days."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from trilane.config.engines import default_precision
from trilane.config.model import ModelShape
from trilane.forecasting.forecast import forecast
from trilane.forecasting.request import forecast_request
from trilane.forecasting.shape_forecasts import ShapeForecast, ShapeForecasts
from trilane.planning.proposals import Proposal, size_text
from trilane.planning.size_request import MOST, SizeRequest
from trilane.planning.sizing import survey, why_none
from trilane.utils.validation import require, require_positive

NEAR = 0.02  # the bisection ends where a size that ends in time is this near to one that does not
SMOOTH = ((32, 8), (8, 4), (0, 1))  # from so many layers on, the depths that are tried first are multiples of this
LOOKS = 5  # at sizes, ever smaller ones, until some shape ends in time
LISTED = 0.9  # shapes of at least this share of the largest are listed: our choice
ROUNDS = 12  # of the bisection at most; five are usual
MOST_DAYS = 36500.0


def sizes_within(days: float, **asked: Any) -> ShapeForecasts:
    """The largest shapes that end within `days` in nine of ten simulated runs; `asked` are SizeRequest's other fields.

    A bisection over sizes looks at one shape of each; then the shapes near the size that it found are examined, as
    widths and depths differ in what they reach.
    """
    require_positive("days", days)
    require(days <= MOST_DAYS, "days", f"{days:g}", f"must be at most {MOST_DAYS:g}")
    request = SizeRequest(parameters=MOST, **asked)
    low, high = _smallest(request), _largest(request, days)
    seen, reached, too_large = _bisected(request, low, max(low, high), days)
    if reached:
        seen += _examined(request, reached, too_large, days)
    found = {d.proposal.shape: d for d in seen if _ends(d, days)}
    largest = max((d.parameters for d in found.values()), default=low)
    rows = sorted((d for d in found.values() if d.parameters >= LISTED * largest), key=lambda d: -d.parameters)
    last = dataclasses.replace(request, parameters=largest)
    return ShapeForecasts(days=days, request=last, rows=tuple(rows), reason=_reason(last, rows, seen, days))


def _ends(found: ShapeForecast, days: float) -> bool:
    return found.days[1] <= days and not found.proposal.prediction.is_risky


def _reached(found: ShapeForecast, days: float) -> float:
    """The size that would take just the days allowed, if days were as parameters."""
    return found.parameters * days / found.days[1]


def _smallest(request: SizeRequest) -> float:
    """The least parameters, to 1 %, at which the vocabulary leaves any for layers."""
    low, high = 1.0, request.parameters
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        try:
            high = dataclasses.replace(request, parameters=middle).parameters
        except ValueError:
            low = middle
    return high


def _largest(request: SizeRequest, days: float) -> float:
    """Twice the parameters that take the days at the card's peak, 6 FLOPs a parameter and token: too many.

    Twice, as an input embedding of its own computes nothing.
    """
    precision = request.choices.get("precision") or default_precision(request.cluster)
    peak = request.cluster.gpu.flops_per_s(precision) * request.gpus
    return min(MOST, 2 * peak * days * 86400 / 6 / request.tokens)


def _bisected(request: SizeRequest, low: float, high: float, days: float) -> tuple[list[ShapeForecast], float, float]:
    """One shape of each size looked at, the smallest of all first; the largest size that ends in time, and the least
    that does not.

    The next size is the one that would take just the days; the middle, where memory is the limit.
    """
    seen = _forecasts(request, _sized(request, low)[:1])
    if not seen or not _ends(seen[0], days):
        return seen, 0.0, low
    guess, crowded = high / 4, False  # half of the peak
    for _ in range(ROUNDS):
        if high < (1 + NEAR) * low:
            break
        size = min(max(guess, (1 + NEAR / 2) * low), high / (1 + NEAR / 2)) if not crowded else (low * high) ** 0.5
        found = _first_safe(request, _smooth(_sized(request, size)))
        seen += found
        guess, crowded = _reached(found[0], days) if found else 0.0, crowded or not found
        low, high = (size, high) if guess >= size else (low, size)
    return seen, low, high


def _first_safe(request: SizeRequest, shapes: Sequence[ModelShape]) -> list[ShapeForecast]:
    """The first of six shapes that fits the memory, from the middle width outwards; none where none fits."""
    middle = len(shapes) // 2
    for place in sorted(range(len(shapes)), key=lambda i: abs(i - middle))[:6]:
        found = _forecasts(request, [shapes[place]])
        if found and not found[0].proposal.prediction.is_risky:
            return found
    return []


def _examined(request: SizeRequest, reached: float, too_large: float, days: float) -> list[ShapeForecast]:
    """Smooth shapes of each width near the size reached, then all below what the best of them reaches.

    Where none of these ends in time, the next below: each look is two tolerances wide. Odd depths are left out, which
    few pipelines divide.
    """
    seen = _forecasts(request, _smooth(_sized(request, reached)))
    most = max((_reached(d, days) for d in seen if not d.proposal.prediction.is_risky), default=reached)
    most = min(most, too_large / LISTED, MOST)
    for _ in range(LOOKS):
        near = _sized(request, most / (1 + request.tolerance), request.tolerance)
        known = {d.proposal.shape for d in seen}
        found = _forecasts(request, [s for s in near if s not in known and (s.num_layers % 2 == 0 or s.num_layers < 8)])
        seen += found
        if any(_ends(d, days) for d in found):
            break
        most *= (1 - request.tolerance) / (1 + request.tolerance)
    return seen


def _sized(request: SizeRequest, size: float, tolerance: float = 1e-9) -> list[ModelShape]:
    """The request's shapes at another size: within the tolerance, or the one depth of each width that is nearest."""
    return dataclasses.replace(request, parameters=size, tolerance=tolerance).shapes()


def _smooth(shapes: Sequence[ModelShape]) -> list[ModelShape]:
    """The shapes with the nearest depths that many pipelines divide, alone or with embedding and head as layers."""
    found = []
    for shape in shapes:
        step = next(step for least, step in SMOOTH if shape.num_layers >= least)
        depth = round(shape.num_layers / step) * step
        depths = (depth, depth - 2) if step > 1 else (depth,)
        found += [dataclasses.replace(shape, num_layers=depth) for depth in depths]
    return found


def _forecasts(request: SizeRequest, shapes: Sequence[ModelShape]) -> list[ShapeForecast]:
    """The shapes that some topology can run, with their forecasts."""
    return [d for p in survey(request, shapes)[0] if (d := _forecast(p, request))]


def _forecast(proposal: Proposal, request: SizeRequest) -> ShapeForecast | None:
    """The proposal with its forecast; None where interruptions leave no progress."""
    try:
        asked = forecast_request(proposal.plan, tokens=request.tokens, calibration=request.calibration)
        return ShapeForecast(proposal=proposal, forecast=forecast(asked))
    except ValueError:
        return None


def _reason(request: SizeRequest, rows: Sequence[ShapeForecast], seen: Sequence[ShapeForecast], days: float) -> str:
    """Why no shape is larger than `rows`, which have the request's size at most, or why there is none at all."""
    if not seen:
        return why_none(request, survey(request, request.shapes()[:1])[1])
    if not rows:
        least = min(seen, key=lambda d: d.parameters)
        took = f"{least.days[1]:.3g} days for nine runs of ten"
        return f"the smallest shape ({size_text(least.parameters)} parameters) takes {took}"
    if request.parameters > LISTED * MOST:
        return f"sizes above {MOST:g} parameters are not looked at"
    if rows[0].days[1] > LISTED * days:
        return "larger shapes take longer"
    larger = dataclasses.replace(request, parameters=request.parameters / LISTED)
    proposals, refused = survey(larger, [s for s in _smooth(larger.shapes()) if s.parameters > request.parameters])
    if not proposals:
        return f"of {size_text(larger.parameters)} parameters {why_none(larger, refused)}"
    if all(p.prediction.is_risky for p in proposals):
        return f"every shape of {size_text(larger.parameters)} parameters may run out of memory"
    return "larger shapes take longer, or may run out of memory"
