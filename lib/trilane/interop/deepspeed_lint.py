"""A user's DeepSpeed JSON: its contradictions, unknown keys, and the topology that it describes.

DeepSpeed itself ignores a misspelt key outside of its ZeRO block.
"""

import difflib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.interop.deepspeed_config import deepspeed_config
from trilane.utils.validation import DATA, read_json, require, require_integer, require_known

AUTO = "auto"  # in Hugging Face's JSON: the value of the trainer

# The keys that a plan determines; buckets, offload pinning and timers are free.
DECIDED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay", "zero_optimization.stage"),
    *("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"),
    *("fp16.enabled", "bf16.enabled", "data_types.grad_accum_dtype"),
)

# DeepSpeed's defaults for them.
DEFAULTS: dict[str, Any] = {"gradient_clipping": 0.0, "zero_optimization.stage": 0}
DEFAULTS |= {f"zero_optimization.offload_{what}.device": "none" for what in ("optimizer", "param")}
DEFAULTS |= {"fp16.enabled": False, "bf16.enabled": False}


def contradictions(values: Mapping[str, Any], plan: Plan) -> list[str]:
    """Contradictions of a user's JSON with itself, DeepSpeed or the plan, a line each; empty if there are none.

    Raises ValueError for a plan whose engine takes no such JSON.
    """
    t = plan.topology
    require(plan.engine != "megatron", "engine", plan.engine, "takes no DeepSpeed JSON")
    given = _given(values)
    automatic = {name for name, value in _flat(values, "") if value == AUTO}
    lines = own_contradictions(values, pp=t.pp, dp=t.dp)
    planned = {**DEFAULTS, **_given(deepspeed_config(plan, compiler=True))}
    for name in (name for name in DECIDED if name not in automatic):
        value = given.get(name, DEFAULTS.get(name))
        if value is not None and name in planned and value != planned[name]:
            lines.append(f"{name}={value}: the plan has {planned[name]}")
    return lines


def read_topology(values: Mapping[str, Any], *, tp: int = 1, pp: int = 1, dp: int = 1) -> Topology:
    """The topology that a user's JSON describes on tp x pp x dp GPUs. Raises ValueError for the first contradiction."""
    given = _given(values)
    if lines := own_contradictions(values, pp=pp, dp=dp):
        raise ValueError(lines[0])
    gbs, mbs, steps = _batch(given, dp)
    precision = next((p for p in ("fp16", "bf16") if given.get(f"{p}.enabled")), "fp32")
    offload = "full" if _device(given, "param") == "cpu" else _device(given, "optimizer")
    return Topology(
        tp=tp,
        pp=pp,
        dp=dp,
        mbs=mbs or 1,
        gbs=gbs or (mbs or 1) * (steps or 1) * dp,
        zero=given.get("zero_optimization.stage", 0),
        offload="optimizer" if offload == "cpu" else offload,
        precision=precision,
        fp32_gradients=precision != "fp32" and given.get("data_types.grad_accum_dtype") == "fp32",
    )


def own_contradictions(values: Mapping[str, Any], *, pp: int = 1, dp: int = 1) -> list[str]:
    """What DeepSpeed would refuse, or ignore silently, on tp x pp x dp processes; a line each."""
    given = _given(values)
    return unknown_keys(values) + (_wrong_types(given) or _inconsistent(given, pp, dp))


def _wrong_types(given: Mapping[str, Any]) -> list[str]:
    """Values of a wrong type, which cannot be checked further."""
    lines = []
    for name in (name for name in DECIDED if name in given):
        try:
            if name in DECIDED[:3]:
                require_integer(name, given[name], 1)
            elif name.endswith(".enabled"):
                require(isinstance(given[name], bool), name, repr(given[name]), "must be true or false")
            elif name.endswith(".device"):
                require_known(name, given[name], ("none", "cpu"))
        except ValueError as error:
            lines.append(str(error))
    return lines


def _inconsistent(given: Mapping[str, Any], pp: int, dp: int) -> list[str]:
    gbs, mbs, steps = _batch(given, dp)
    stage = given.get("zero_optimization.stage", 0)
    zero, rules = "zero_optimization", []
    if gbs is not None and (mbs is None or steps is None or gbs != mbs * steps * dp):
        product = f"train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp = {mbs} x {steps} x {dp}"
        rules.append(f"train_batch_size={gbs}: must be {product}")
    if given.get("fp16.enabled") and given.get("bf16.enabled"):
        rules.append("bf16.enabled=True: fp16 is enabled too")
    if stage not in (0, 1, 2, 3):
        rules.append(f"{zero}.stage={stage}: ZeRO stages are 0, 1, 2 and 3")
    if stage in (2, 3) and pp > 1:
        rules.append(f"{zero}.stage={stage}: ZeRO 2 and 3 cannot run with a pipeline (pp={pp})")
    if stage == 0 and _device(given, "optimizer") != "none":
        rules.append(f"{zero}.offload_optimizer.device={_device(given, 'optimizer')}: needs ZeRO stage 1 or more")
    if stage != 3 and _device(given, "param") != "none":
        rules.append(f"{zero}.offload_param.device={_device(given, 'param')}: needs ZeRO stage 3")
    elif _device(given, "param") != "none" and _device(given, "optimizer") == "none":
        rules.append(f"{zero}.offload_param.device={_device(given, 'param')}: a plan offloads the optimizer with it")
    return rules


def _device(given: Mapping[str, Any], what: str) -> str:
    return given.get(f"zero_optimization.offload_{what}.device", "none")


def _batch(given: Mapping[str, Any], dp: int) -> tuple[int | None, int | None, int | None]:
    """(global batch, microbatch, accumulation steps), a missing one computed as in DeepSpeed."""
    gbs, mbs, steps = (given.get(name) for name in DECIDED[:3])
    if gbs is not None and mbs is None:
        mbs = gbs // (dp * (steps or 1))
    if gbs is not None and steps is None:
        steps = gbs // max(1, dp * (mbs or 1))
    return gbs, mbs, steps


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, without values that are "auto"."""
    return {name: value for name, value in _flat(values, "") if value != AUTO}


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


@functools.cache
def known_keys() -> dict[str, list[str]]:
    """The keys of each block by its dotted name, "" for the outermost; blocks not listed are not checked.

    Those of optimizer.params hold for Adam and AdamW.
    """
    return read_json(DATA / "deepspeed_keys.json", "keys")["keys"]


def unknown_keys(values: Mapping[str, Any]) -> list[str]:
    """A line for each key that DeepSpeed does not know, with the nearest known key."""
    blocks = dict(known_keys())
    optimizer = values.get("optimizer")
    if not isinstance(optimizer, Mapping) or str(optimizer.get("type", "AdamW")).lower() not in ("adam", "adamw"):
        del blocks["optimizer.params"]
    return _unknown(values, "", blocks)


def _unknown(values: Mapping[str, Any], block: str, blocks: Mapping[str, list[str]]) -> list[str]:
    lines = []
    for key, value in values.items():
        name = f"{block}.{key}" if block else key
        if key not in blocks[block]:
            close = difflib.get_close_matches(str(key), blocks[block], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            lines.append(f"{name}={_short(value)}: DeepSpeed has no such key{hint}")
        elif name in blocks and isinstance(value, Mapping):
            lines += _unknown(value, name, blocks)
        elif name in blocks and value is not None:
            lines.append(f"{name}={_short(value)}: must be a JSON object")
    return lines


def _short(value: object) -> str:
    return "{...}" if isinstance(value, Mapping) else str(value)


def replicas(values: Mapping[str, Any]) -> int:
    """The data-parallel size implied by the three batch sizes; 1 if one of them is missing."""
    sizes = [values.get(name) for name in DECIDED[:3]]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return 1
    gbs, mbs, steps = sizes
    return max(1, gbs // (mbs * steps))  # type: ignore[operator]


def own_topology(values: Mapping[str, Any], tp: int, pp: int, dp: int) -> tuple[list[str], Topology | None]:
    """The contradictions of a DeepSpeed JSON with itself or, if there are none, the topology that it describes."""
    if lines := own_contradictions(values, pp=pp, dp=dp):
        return lines, None
    try:
        return [], read_topology(values, tp=tp, pp=pp, dp=dp)
    except ValueError as error:
        return [str(error)], None
