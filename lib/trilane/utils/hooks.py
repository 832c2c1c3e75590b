"""What stands beside trilane and hooks into it: trilane imports neither package, it asks here."""

from importlib import import_module
from typing import Any

HOOKS = {
    # commands
    "debug": "trilane_diagnose.commands:GROUP",
    "job": "trilane_diagnose.job_commands:GROUP",
    # what 04 shows
    "breaks": "trilane_diagnose.continuity:find_breaks",
    # what reads a .bin/.idx pair
    "check_pair": "trilane_engine.data.corpus:check_pair",
    # what a site may change of what follows when a run ends
    "responses": "trilane_diagnose.response:require_responses",
    # what a training on this machine calls: at its begin, at each check, at its end
    "monitor": "trilane_diagnose.watchdog:HangMonitor",
}


def hook(name: str) -> Any:
    """The object that stands at that hook, imported now."""
    module, _, attribute = HOOKS[name].partition(":")
    return getattr(import_module(module), attribute)
