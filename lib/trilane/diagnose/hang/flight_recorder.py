"""Reader of PyTorch's Flight Recorder dumps: which collectives a rank entered and finished, per process group."""

import ast
import io
import json
import pickle
from dataclasses import dataclass, replace
from typing import Any, NoReturn


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective as a rank recorded it. `group` is the process group's name, `ranks` its members."""

    group: str
    desc: str
    ranks: tuple[int, ...]
    sequence: int
    p2p: bool
    op: str
    sizes: str
    state: str
    done: bool

    @property
    def number(self) -> tuple[str, bool, int]:
        """Identifies the batch of the call."""
        return self.group, self.p2p, self.sequence


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The calls of one rank, oldest first; `entered` is the last sequence number that it entered in each group."""

    calls: tuple[Call, ...]
    entered: dict[str, int]

    @property
    def waiting(self) -> Call | None:
        """The oldest unfinished call, which all later ones wait for; None where all are done."""
        return next((call for call in self.calls if not call.done), None)


class _Plain(pickle.Unpickler):
    """Reads lists, dicts, text and numbers only: any other object in a pickle could run code, and is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which no Flight Recorder dump needs")


def read_recording(data: bytes) -> Recording:
    """The recording in a dump, pickle or JSON (`_dump_nccl_trace`, `_dump_fr_trace_json`); ValueError for other data,
    also truncated.

    Format 2.x of torch 2.3 to 2.13 (torch/csrc/distributed/c10d/FlightRecorder.hpp). Left out: C++ stacks, timings.
    """
    try:
        values = json.loads(data) if data.lstrip()[:1] == b"{" else _Plain(io.BytesIO(data)).load()
        members = {name: _ranks(config.get("ranks")) for name, config in (values.get("pg_config") or {}).items()}
        calls = tuple(_call(entry, members) for entry in values["entries"])
        # pg_status numbers the groups of this rank (pg_id); the rest has their names, which all ranks share
        names = {str(entry["pg_id"]): str(entry["process_group"][0]) for entry in values["entries"] if "pg_id" in entry}
        status = {names[k]: v for k, v in (values.get("pg_status") or {}).items() if k in names}
        entered = {name: int(v["last_enqueued_collective"]) for name, v in status.items()}
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"no Flight Recorder dump, or truncated ({error})") from None
    for call in calls:
        if not call.p2p:
            entered[call.group] = max(entered.get(call.group, 0), call.sequence)
    return Recording(calls=_in_order(calls), entered=entered)


def _in_order(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """The calls; a "scheduled" one counts as done where a later one of its group is, since NCCL keeps order.

    The calls of a batch (batch_isend_irecv, a coalescing manager) stay "scheduled": only the entry `nccl:coalesced`
    that closes the batch is timed, with their group and number (torch/distributed/flight_recorder/components/utils.py,
    find_coalesced_group).
    """
    done: set[str] = set()
    found = []
    for call in reversed(calls):
        found.append(replace(call, done=call.done or (call.state == "scheduled" and call.group in done)))
        done |= {call.group} if call.state == "completed" else set()  # gloo, which keeps no order, never reports that
    return tuple(reversed(found))


def _call(entry: dict[str, Any], members: dict[str, tuple[int, ...]]) -> Call:
    group, desc = [*entry["process_group"], ""][:2]
    p2p = bool(entry.get("is_p2p"))
    state = str(entry.get("state", ""))
    return Call(
        group=str(group),
        desc=str(desc),
        # torch names the default group "" in pg_config and "0" in the entries of gloo
        ranks=members.get(str(group)) or (members.get("", ()) if group == "0" else ()),
        sequence=int(entry.get("p2p_seq_id" if p2p else "collective_seq_id", entry.get("seq_id", 0)) or 0),
        p2p=p2p,
        op=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        sizes=str(entry.get("input_sizes", "")),
        state=state,
        # NCCL reports "completed"; gloo only retires the entry
        done=state == "completed" or (bool(entry.get("retired")) and state != "started"),
    )


def _ranks(value: Any) -> tuple[int, ...]:
    """The ranks of a group, which torch writes as text "[0, 1]", other tools as a list."""
    return tuple(int(rank) for rank in (ast.literal_eval(value) if isinstance(value, str) and value else value or ()))
