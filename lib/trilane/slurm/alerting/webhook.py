"""Webhook and mail: an alert leaves this host as JSON or as a mail; a try ends within seconds, whatever the other does.

The webhook's URL comes from the environment alone and is a secret: no file, log, error or command line shows more of it
than scheme and host.
"""

import json
import os
import queue
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trilane.slurm.alerting.alerts import Alert
from trilane.utils.tables import short
from trilane.utils.validation import require

VARIABLE = "TRILANE_WEBHOOK"
SILENCE_S = 5.0  # for the connection, and between two bytes of an answer
TRY_S = 8.0  # one try in all: an answer may come byte by byte, and a resolver of names has its own, longer time-outs
MOST_OPEN = 4  # tries that did not end in time and may still hold a socket
# no dash or slash in front: `mail` would take an option or a file
ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}(?:@[A-Za-z0-9][A-Za-z0-9.-]{0,252})?")
SENDMAIL = ("sendmail", "/usr/sbin/sendmail", "/usr/lib/sendmail")  # it is often not in a user's PATH


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A webhook has one address; where it sends us next may be anybody's."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """An http or https address that takes JSON as Slack's incoming webhooks do; its text and repr hide the address."""

    url: str = field(repr=False)

    def __post_init__(self) -> None:
        is_plain = self.url.isascii() and self.url.isprintable() and " " not in self.url and len(self.url) <= 2000
        try:
            parts = urlsplit(self.url)
            is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_known = False
        rule = "must be an http or https URL without blanks"
        require(is_plain and is_known, VARIABLE, "(not shown)", rule)
        require("@" not in parts.netloc, VARIABLE, str(self), "must hold no user name or password")

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname}{port}/..."

    def post(self, values: Mapping[str, Any]) -> str:
        """POST `values` as JSON; why that failed in one line, "" where the other side answered 2xx."""
        problem = in_time(lambda: self._post(json.dumps(values).encode()))
        return f"the webhook at {self} {problem}" if problem else ""

    def _post(self, body: bytes) -> str:
        """An exception's text may hold the URL: only an error number and an answer's status are passed on."""
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=SILENCE_S) as answer:
                return "" if 200 <= answer.status < 300 else f"answered {answer.status}"
        except urllib.error.HTTPError as error:
            error.close()
            return f"answered {error.code}" + (
                ", a redirection, which is not followed" if 300 <= error.code < 400 else ""
            )
        except urllib.error.URLError as error:
            reason = error.reason
            return f"cannot be reached ({getattr(reason, 'strerror', None) or type(reason).__name__})"
        except OSError as error:
            return f"broke the connection ({error.strerror or type(error).__name__})"
        except Exception as error:  # http.client's own, such as an answer that is not HTTP
            return f"gave no valid answer ({type(error).__name__})"


def webhook(env: Mapping[str, str] = os.environ) -> Webhook | None:
    """The webhook of TRILANE_WEBHOOK, None where it is not set; ValueError, without the URL, where it is none."""
    url = env.get(VARIABLE, "").strip()
    return Webhook(url=url) if url else None


def in_time(work: Callable[[], str]) -> str:
    """What `work` returns; after TRY_S that it did not answer, and its thread is left to end by itself."""
    if sum(thread.name == VARIABLE for thread in threading.enumerate()) >= MOST_OPEN:
        return "was not tried: earlier tries have not ended"
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(work()), name=VARIABLE, daemon=True).start()
    try:
        return answers.get(timeout=TRY_S)
    except queue.Empty:
        return f"did not answer within {TRY_S:g} s"


def mail_command(address: str, subject: str) -> tuple[list[str], str]:
    """The command that mails what it reads, and the header that it wants to read first; [] where none is installed."""
    if program := next((path for name in SENDMAIL if (path := shutil.which(name))), None):
        return [program, "-i", address], f"To: {address}\nSubject: {subject}\n\n"
    return (["mail", "-s", subject, address], "") if shutil.which("mail") else ([], "")


def post_mail(address: str, alert: Alert) -> str:
    """Mail the alert by this host's sendmail or mail; why that failed in one line, "" where the program took it.

    Subject and text are one line each, and none begins with a tilde, which some `mail` programs take for a command.
    """
    command, head = mail_command(address, short(f"trilane: {alert.run}: {alert.kind}", 120))
    text = f"{head}trilane: {alert}\n"
    try:
        sent = subprocess.run(command, input=text, text=True, capture_output=True, timeout=TRY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{Path(command[0]).name} failed ({type(error).__name__})"
    return "" if sent.returncode == 0 else f"{Path(command[0]).name}: exit code {sent.returncode}"
