"""Plan, launch and analyze the pre-training of large GPTs on SLURM clusters (tensor, pipeline and data parallelism).

Everything that a notebook needs is imported from here; a name is loaded when it is first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Each public name and the module that defines it.
_MODULES = {
    "analysis.collect": ("measure_runs",),
    "analysis.measure": ("measure",),
    "analysis.recalibrate": ("next_runs", "recalibrate"),
    "analysis.studies": ("compare_studies",),
    "config.plan": ("Plan", "read_plan"),
    "costmodel.backtest": ("backtest",),
    "costmodel.predict": ("predict",),
    "costmodel.recalibration": ("fit",),
    "costmodel.shipped": ("calibration_for",),
    "diagnose.hang": ("diagnose_hang", "study_hang"),
    "diagnose.restart": ("compare_restart", "study_restart"),
    "forecasting.deadline": ("best_within", "sizes_within"),
    "forecasting.decision": ("alternatives", "calendar_record", "decide", "study_plan"),
    "forecasting.forecast": ("forecast",),
    "logs.written_tables": ("read_runs",),
    "planning": ("published",),
    "planning.explain": ("explain",),
    "planning.search": ("search",),
    "planning.sizing": ("hand_on", "propose_shapes", "survey_shapes"),
    "planning.space": ("read_choices",),
    "report": ("plots",),
    "report.index": ("save_fleet",),
    "report.widgets": ("explore",),
    "slurm.sites": ("JobRequest",),
    "slurm.study_runs": ("prepare_runs",),
    "workspace.study": ("Study", "load_cluster"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """The public name `name`, imported from its module (or as one) at first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'trilane' has no attribute {name!r}")
    home = import_module(f"trilane.{_HOME[name]}")
    value = getattr(home, name) if hasattr(home, name) else import_module(f"{home.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
