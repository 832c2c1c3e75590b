"""Plan, launch and analyze the pre-training of large GPTs on SLURM clusters (tensor, pipeline and
data parallelism).

Everything that a notebook needs is imported from here; a name is loaded when it is first used.
"""

from importlib import import_module
from typing import Any

from trilane.utils.validation import with_nearest

__version__ = "0.1.0"

# each module with its public names
_MODULES = {
    "trilane.analysis.collect": "measure_runs",
    "trilane.analysis.measure": "measure",
    "trilane.analysis.recalibrate": "fit recalibrate",
    "trilane.config.cluster": "clusters",
    "trilane.config.plan": "Plan read_plan",
    "trilane.costmodel.backtest": "backtest",
    "trilane.costmodel.predict": "predict",
    "trilane.costmodel.shipped": "calibration_for",
    "trilane.planning.alternatives": "alternatives levers what_ifs",
    "trilane.planning.deadline": "best_within",
    "trilane.planning.decision": "Decision calendar_record decide study_plan",
    "trilane.forecasting.forecast": "forecast",
    "trilane.launch.local": "train",
    "trilane.logs.run": "read_logs",
    "trilane.planning.explain": "explain",
    "trilane.planning.search": "search",
    "trilane.planning.sizing": "hand_on propose_shapes survey_shapes",
    "trilane.planning.space": "read_choices",
    "trilane.report.plots": "plots",
    "trilane.report.widgets": "explore",
    "trilane.slurm.sites": "JobRequest",
    "trilane.slurm.study_runs": "prepare_runs",
    "trilane.workspace.study": "Study load_cluster",
    "trilane_diagnose.hang": "diagnose_hang study_hang",
    "trilane_diagnose.restart": "compare_restart study_restart",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """The public name, or the public module of that name, imported at its first use."""
    if name not in _HOME:
        rule = f"module 'trilane' has no attribute {name!r}"
        raise AttributeError(with_nearest(rule, name, __all__))
    module = import_module(_HOME[name])
    globals()[name] = getattr(module, name, module)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
