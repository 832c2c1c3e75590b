"""Plan, launch and analyze the pre-training of large GPTs on SLURM clusters (tensor, pipeline and
data parallelism).

Everything that a notebook needs is imported from here; a name is loaded when it is first used.
Where a function takes a plan, cluster, model, study or calibration, it takes its file or name as
well, and a misspelt option names its nearest.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from trilane.utils.validation import with_nearest

__version__ = "0.1.0"

# Each public name and the module that defines it.
_MODULES = {
    "analysis.collect": ("measure_runs",),
    "analysis.measure": ("measure",),
    "analysis.recalibrate": ("recalibrate",),
    "analysis.studies": ("compare_studies",),
    "config.plan": ("Plan", "read_plan"),
    "costmodel.backtest": ("backtest",),
    "costmodel.predict": ("predict",),
    "costmodel.recalibration": ("fit",),
    "costmodel.shipped": ("calibration_for",),
    "trilane_diagnose.hang": ("diagnose_hang", "study_hang"),
    "trilane_diagnose.restart": ("compare_restart", "study_restart"),
    "forecasting.deadline": ("best_within", "sizes_within"),
    "forecasting.alternatives": ("alternatives", "levers", "what_ifs"),
    "forecasting.decision": ("Decision", "calendar_record", "decide", "study_plan"),
    "forecasting.forecast": ("forecast",),
    "launch.local": ("train",),
    "logs.written_tables": ("read_runs",),
    "planning": ("published",),
    "planning.explain": ("explain",),
    "planning.search": ("search",),
    "planning.sizing": ("hand_on", "propose_shapes", "survey_shapes"),
    "planning.space": ("read_choices",),
    "report": ("plots",),
    "report.widgets": ("explore",),
    "slurm.sites": ("JobRequest",),
    "slurm.study_runs": ("prepare_runs",),
    "workspace.study": ("Study", "load_cluster"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)

# The classes of which a name or path is taken instead: by what it is read, and what it can be.
_READ = {
    "Plan": ("trilane.config.plan:read_plan", "a Plan, or the path of a plan.json"),
    "Cluster": (
        "trilane.workspace.study:load_cluster",
        "a Cluster, its name, or the path of its JSON file",
    ),
    "ModelShape": (
        "trilane.config.shapes:read_shape",
        "a ModelShape, layers,hidden,heads,seq,vocab, or a config.json's path",
    ),
    "Study": ("trilane.workspace.study:Study", "a Study, or its name"),
    "Calibration": (
        "trilane.costmodel.calibration:load",
        "a Calibration, what fit() returns, a study, a software stack, or the path of a JSON file",
    ),
    "Path": ("pathlib:Path", "a path"),
}
# Whose fields the options of a function are, which take texts as commands do.
_ASKED = dict.fromkeys(
    ("best_within", "propose_shapes", "sizes_within"), "trilane.planning.size_request:SizeRequest"
)
_ASKED["forecast"] = "trilane.forecasting.request:ForecastRequest"


def __getattr__(name: str) -> Any:
    """The public name `name`, imported from its module (or as one) at first use."""
    if name not in _HOME:
        raise AttributeError(
            with_nearest(f"module 'trilane' has no attribute {name!r}", name, __all__)
        )
    path = _HOME[name]
    home = import_module(path if path.startswith("trilane_") else f"trilane.{path}")
    value = getattr(home, name) if hasattr(home, name) else import_module(f"{home.__name__}.{name}")
    globals()[name] = _called(value) if inspect.isfunction(value) else value
    return globals()[name]


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """A public function that reads names and paths. TypeError names the option that is nearest to a
    misspelt one, ValueError an argument of another class.
    """
    signature, hints, name = (
        inspect.signature(function),
        typing.get_type_hints(function),
        function.__name__,
    )
    options = typing.get_type_hints(_named(_ASKED[name])) if name in _ASKED else {}

    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        known = {**options, **signature.parameters}
        hint = "".join(
            with_nearest(f"; {key}= is not known", key, known) for key in named if key not in known
        )
        try:
            bound = signature.bind(*values, **named)
            if hint and options:
                raise TypeError("wrong options")
        except TypeError as error:
            raise TypeError(f"{name}: {error}{hint}") from None
        for key, value in bound.arguments.items():
            if key == "calibration" and isinstance(value, str | Path):
                value = _constants(str(value), bound.arguments)
            if signature.parameters[key].kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[key] = {
                    k: _taken(k, v, options.get(k, Any), bool(options)) for k, v in value.items()
                }
            else:
                bound.arguments[key] = _taken(key, value, hints.get(key, Any))
        return function(*bound.args, **bound.kwargs)

    return call


def _constants(source: str, given: dict[str, Any]) -> Any:
    """The constants of a file, a study or a software stack, for the cluster, or that of the plan,
    given before them.
    """
    known = (getattr(value, "cluster", value) for value in given.values())
    machine = next((one for one in known if type(one).__name__ == "Cluster"), None)
    return (
        _named("trilane.costmodel.shipped:calibration_for")(machine, source) if machine else source
    )


def _taken(name: str, value: Any, hint: Any, is_text: bool = False) -> Any:
    """The argument, read where its class is one of _READ and a name or path is given; a text where
    `is_text`.
    """
    value = (
        value.tolist() if hasattr(value, "tolist") else value
    )  # numpy's numbers and arrays, pandas' columns
    kinds = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (types.UnionType, typing.Union)
        else (hint,)
    )
    items = [typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is Sequence]
    if items and isinstance(value, list | tuple | range):
        return [_taken(name, one, items[0]) for one in value]
    classes = {
        k.__name__: (int, float) if k is float else k
        for k in (*kinds, *items)
        if isinstance(k, type) and k is not Any
    }
    able = [kind for kind in classes if kind in _READ]
    if isinstance(value, tuple(classes.values())):
        return [value] if items == [*kinds] else value
    is_table = Any in kinds and str(value).endswith(".csv")  # instead of a DataFrame
    if able and isinstance(value, str | Path) and not is_table:
        made = _named(_READ[able[0]][0])(str(value))
        made = made.shape if able[0] == "ModelShape" else made
        return [made] if items else made
    if "Calibration" in able and hasattr(value, "fitted"):
        return value.fitted
    if len(classes) + len({*items} - {Any}) < len(kinds) or (
        is_text and isinstance(value, str | None)
    ):
        return value  # a hint of more than classes: what the function itself checks
    rule = (
        _READ[able[0]][1]
        if able
        else " or ".join(set(classes) - {"NoneType"}) + ", or several" * bool(items)
    )
    raise ValueError(f"{name}={type(value).__name__}: must be {rule}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
