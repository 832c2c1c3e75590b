"""Delivery: alerts sent in a thread, each once by whichever process comes first; the run folders' ledgers record it."""

import contextlib
import os
import queue
import secrets
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trilane.slurm import ledger
from trilane.slurm.alerting.alerts import Alert, recorded
from trilane.slurm.alerting.webhook import ADDRESS, VARIABLE, Webhook, mail_command, post_mail, webhook
from trilane.slurm.script import SCRIPT, directives
from trilane.utils.files import read_text
from trilane.utils.process import python

PAUSE_S = 2.0  # between the two tries of one delivery
AGAIN_S = (60.0, 300.0, 1800.0)  # from a delivery that failed to the next; after the last it is given up
CLAIM_S = 60.0  # in which a process that has begun a delivery has ended it, or died
CLOSE_S = 20.0  # for both tries of a delivery


def addresses(folders: Iterable[Path]) -> dict[Path, str]:
    """The address in each folder's job script (--mail-user), where this host can send mail to it."""
    found = dict[Path, str]()
    for folder in folders if mail_command("", "")[0] else ():
        with contextlib.suppress(ValueError):
            found[folder] = directives(read_text(folder / SCRIPT)).get("mail-user", "")
    return {folder: address for folder, address in found.items() if ADDRESS.fullmatch(address)}


def sender(folders: Iterable[Path], env: Mapping[str, str] = os.environ) -> "Sender | None":
    """What sends the alerts of these runs: by the environment's webhook, and by mail to who has asked for it in a job.

    None where there is neither. ValueError, without the URL, where the webhook is none.
    """
    hook, mail = webhook(env), addresses(folders)
    return Sender(hook, mail) if hook or mail else None


def _claim(folder: Path, alert: Alert, me: str) -> bool | None:
    """Whether this process is to deliver the alert now; None where nobody ever needs to again.

    The order of the ledger's lines decides between two processes: the first that notes "sending" delivers.
    """
    lines = _lines(folder, alert)
    failed = [line for line in lines if line["state"] == "failed"]
    if any(line["state"] == "sent" for line in lines) or len(failed) > len(AGAIN_S):
        return None
    if failed and ledger.age_s(failed[-1]) < AGAIN_S[len(failed) - 1]:
        return False
    _note(folder, alert, "sending", me)
    return next(iter(_begun(_lines(folder, alert))), me) == me


def _lines(folder: Path, alert: Alert) -> list[dict[str, Any]]:
    return [event for event in ledger.events(folder, ledger.ALERTED) if event["key"] == alert.key]


def _begun(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Who has begun a delivery and not ended it, oldest first, but for those that must have died."""
    begun = dict[str, None]()
    for line in lines:
        if line["state"] == "sending" and ledger.age_s(line) < CLAIM_S:
            begun[line["by"]] = None
        elif line["state"] != "sending":
            begun.pop(line["by"], None)
    return list(begun)


def _note(folder: Path, alert: Alert, state: str, me: str, **facts: str) -> None:
    """Record the delivery; on a full disk, which an alert may be about, only in this process."""
    with contextlib.suppress(OSError):
        ledger.note(folder, ledger.ALERTED, alert.job, key=alert.key, state=state, by=me, **facts)


class Sender:
    """Sends alerts in a thread of its own, each once: the ledgers record what was sent, also by other processes.

    A delivery that fails is tried again when the alert is offered again, after each of AGAIN_S.
    """

    def __init__(self, hook: Webhook | None, addresses: Mapping[Path, str]) -> None:
        self._hook, self._addresses = hook, dict(addresses)
        self._waiting: queue.SimpleQueue[tuple[Path, Alert]] = queue.SimpleQueue()
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._known: set[tuple[Path, str]] = set()  # queued, sent or given up
        self._left = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def __str__(self) -> str:
        """Where the alerts go, in one line."""
        ways = [f"to {self._hook}"] * bool(self._hook) + [
            f"by mail to {a}" for a in sorted(set(self._addresses.values()))
        ]
        return f"alerts go {' and '.join(ways)}"

    def try_out(self) -> list[str]:
        """Send one that only tries the webhook; its problems."""
        test = Alert(kind="test", run="trilane", job="", key="", text="alerts of runs will arrive here")
        return list(filter(None, [self._hook.post(test.to_json())])) if self._hook else []

    def offer(self, folder: Path, found: Iterable[Alert]) -> None:
        """Send those that were not sent yet; returns at once."""
        for alert in found if self._hook or folder in self._addresses else ():
            with self._changed:
                if (folder, alert.key) in self._known:
                    continue
                self._known.add((folder, alert.key))
                self._left += 1
            self._waiting.put((folder, alert))

    def problems(self) -> list[str]:
        """A line for each delivery that failed since the last call."""
        return [self._problems.get() for _ in range(self._problems.qsize())]

    def close(self, seconds: float = CLOSE_S) -> list[str]:
        """Wait until all that was offered is sent or has failed, at most so many seconds; the problems left."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._left, seconds):
                self._problems.put(f"{self._left} alerts could not be sent in {seconds:g} s")
        return self.problems()

    def _work(self) -> None:
        while True:
            folder, alert = self._waiting.get()
            try:
                is_final = self._deliver(folder, alert)
            except Exception as error:  # whatever it is, the next alert may get through
                is_final = True
                self._problems.put(f"alert not sent: {type(error).__name__}")
            with self._changed:
                self._known -= set() if is_final else {(folder, alert.key)}
                self._left -= 1
                self._changed.notify_all()

    def _deliver(self, folder: Path, alert: Alert) -> bool:
        """Send it, unless another process has or does, or it is too early for another try; whether that is final."""
        me = secrets.token_hex(6)
        is_mine = _claim(folder, alert, me)
        if not is_mine:
            return is_mine is None
        problems = self._tried(folder, alert)
        is_sent = "" in problems
        why = "; ".join(filter(None, problems))
        _note(folder, alert, "sent" if is_sent else "failed", me, says=why)
        if why:
            self._problems.put(f"alert {alert.kind!r} of {alert.run}: {why}")
        return is_sent

    def _tried(self, folder: Path, alert: Alert) -> list[str]:
        """The problem of each way that the alert takes, "" where it was taken; the webhook gets two tries."""
        problems = list[str]()
        if self._hook:
            problems.append(self._hook.post(alert.to_json()))
            if problems[0]:
                time.sleep(PAUSE_S)
                problems = [self._hook.post(alert.to_json())]
        return problems + ([post_mail(self._addresses[folder], alert)] if folder in self._addresses else [])


def send_apart(folder: Path, env: Mapping[str, str] = os.environ, *, wait: bool = False) -> None:
    """Start a process that sends what the folder's ledger records, and return at once: the training does not wait.

    With `wait` it is given CLOSE_S to end: at the end of a job SLURM ends what the job has started.

    For the job itself. Where compute nodes have no internet (HF_HUB_OFFLINE, which the job script sets at such a site)
    nothing is started: `watch` sends the alerts.
    """
    if env.get(VARIABLE) and env.get("HF_HUB_OFFLINE") != "1" and recorded(folder):
        command = python("-m", "trilane", "slurm", "alert", str(folder))
        nowhere = subprocess.DEVNULL
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            sending = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)
            if wait:
                sending.wait(CLOSE_S)
