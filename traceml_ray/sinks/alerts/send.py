"""
Sends one message to one destination. An error says whether it may be tried again, and holds no secret: URLs
are shown without login, path and query.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import smtplib
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from email.message import EmailMessage
from email.utils import formatdate, make_msgid, parseaddr
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec

from traceml_ray import __version__, text
from traceml_ray.errors import error_text
from traceml_ray.sinks.no_redirect import NoRedirect

from . import words
from .config import Alertmanager, Email, Place, Program, Slack, Webhook
from .rules import AlertMessage

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds between the attempts to send a message."""
_LASTS = 5
"""Alertmanager keeps an alert for so many of the intervals in which it is sent again."""
_MOST_BODY = 300
_PORTS = {"starttls": 587, "ssl": 465, "none": 25}
_TEMPORARY = (408, 425, 429)
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""Variables that a command has besides those of the message."""


class SendError(Exception):
    """A message was not delivered. `again`: it may be if it is sent again."""

    def __init__(self, why: str, *, again: bool) -> None:
        super().__init__(why)
        self.again = again


def where_of(place: Place) -> str:
    """Return where a destination is, without secrets."""
    if isinstance(place, Email):
        return f"{place.host}:{place.port or _PORTS[place.security]}"
    if isinstance(place, Program):
        return place.argv[0]
    return shown(place.url)


def shown(url: str) -> str:
    """Return a URL without login, path and query."""
    try:
        parts = urlsplit(url)
        name, port = parts.hostname or "", parts.port
    except ValueError:
        return "a URL that cannot be read"
    host = f"[{name}]" if ":" in name else name
    return f"{parts.scheme}://{host}" + ("" if port is None else f":{port}")


def send(place: Place, message: AlertMessage, secrets: Sequence[str] = ()) -> None:
    """
    Send a message to a destination whose variables are replaced (`config.resolved`). Raises SendError, in
    whose text `secrets` are hidden.
    """
    try:
        _send(place, message)
    except SendError as error:
        raise SendError(_hidden(str(error), secrets), again=error.again) from None
    except Exception as error:
        raise SendError(_hidden(error_text(error), secrets), again=False) from None


def send_again(
    place: Place,
    message: AlertMessage,
    secrets: Sequence[str],
    ending: threading.Event,
    pauses_s: Sequence[float] = PAUSES_S,
) -> None:
    """
    Send a message; after a failure that may pass, try again. Once `ending` is set the pauses are short.
    Raises the last SendError.
    """
    for pause_s in (*pauses_s, None):
        try:
            send(place, message, secrets)
            return
        except SendError as error:
            if pause_s is None or not error.again:
                raise
        if ending.wait(pause_s):
            time.sleep(min(pause_s, 1.0))


def _send(place: Place, message: AlertMessage) -> None:
    if isinstance(place, Webhook):
        _post(place.url, words.to_json(message), place.headers, place.timeout_s)
    elif isinstance(place, Slack):
        _post(place.url, words.to_slack(message), {}, place.timeout_s)
    elif isinstance(place, Alertmanager):
        lasts_s = 60.0 if message.test else _LASTS * place.every_s
        posted = words.to_alertmanager(message, place.labels, time.time_ns(), lasts_s)
        _post(f"{place.url.rstrip('/')}/api/v2/alerts", posted, place.headers, place.timeout_s)
    elif isinstance(place, Email):
        _mail(place, message)
    else:
        _run(place, message)


_OPENER = urllib.request.build_opener(NoRedirect)


def _post(url: str, body: object, headers: dict[str, str], timeout_s: float) -> None:
    if urlsplit(url).scheme not in ("http", "https"):
        raise SendError("its URL must begin with http:// or https://", again=False)
    usual = {"Content-Type": "application/json", "User-Agent": f"traceml-ray/{__version__}"}
    request = urllib.request.Request(url, msgspec.json.encode(body), {**usual, **headers}, method="POST")
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            answer.read(_MOST_BODY)
    except urllib.error.HTTPError as error:
        with error:
            _refused(error.code, error.read(_MOST_BODY))
    except urllib.error.URLError as error:
        wrong = isinstance(error.reason, ssl.SSLCertVerificationError)
        raise SendError(_reason(error.reason), again=not wrong) from None
    except (OSError, EOFError) as error:
        raise SendError(_reason(error), again=True) from None
    except Exception as error:  # http.client raises its own where an answer is no HTTP
        raise SendError(type(error).__name__, again=True) from None


def _refused(code: int, body: bytes) -> NoReturn:
    detail = text.one_line(body.decode("utf-8", "replace").strip())
    raise SendError(
        f"it answered {code}" + (f": {detail}" if detail else ""), again=code >= 500 or code in _TEMPORARY
    )


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)


def _mail(place: Email, message: AlertMessage) -> None:
    mail = mail_of(place, message)
    try:
        with contextlib.closing(_connected(place)) as server:
            if place.user:
                server.login(place.user, place.password)
            refused = server.send_message(mail)
            with contextlib.suppress(OSError):  # the mail is delivered
                server.quit()
        if refused:
            raise SendError(f"it refused {text.count(len(refused), 'recipient')}", again=False)
    except smtplib.SMTPResponseException as error:
        reply = text.one_line(_decoded(error.smtp_error))
        raise SendError(
            f"it answered {error.smtp_code}: {reply}", again=400 <= error.smtp_code < 500
        ) from None
    except smtplib.SMTPRecipientsRefused as error:
        codes = {code for code, _ in error.recipients.values()}
        again = all(400 <= code < 500 for code in codes)
        raise SendError(f"it refused all recipients ({sorted(codes)[0]})", again=again) from None
    except smtplib.SMTPServerDisconnected as error:
        raise SendError(str(error), again=True) from None
    except smtplib.SMTPException as error:  # it has no STARTTLS, or no login
        raise SendError(str(error), again=False) from None
    except ssl.SSLCertVerificationError as error:
        raise SendError(_reason(error), again=False) from None
    except OSError as error:
        raise SendError(_reason(error), again=True) from None


def _connected(place: Email) -> smtplib.SMTP:
    """Return a connection to a mail server, encrypted unless the file says otherwise."""
    port, context = place.port or _PORTS[place.security], ssl.create_default_context()
    if place.security == "ssl":
        return smtplib.SMTP_SSL(place.host, port, timeout=place.timeout_s, context=context)
    server = smtplib.SMTP(place.host, port, timeout=place.timeout_s)
    if place.security == "starttls":
        try:
            server.starttls(context=context)
        except BaseException:
            server.close()
            raise
    return server


def _decoded(reply: object) -> str:
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)


def mail_of(place: Email, message: AlertMessage) -> EmailMessage:
    """Return a message as an e-mail. All of a session refer to the same one: a thread."""
    mail = EmailMessage()
    mail["Subject"] = text.one_line(words.title(message))
    mail["From"] = place.sender
    mail["To"] = ", ".join(place.to)
    mail["Date"] = formatdate(message.made_ns / 1e9)
    domain = parseaddr(place.sender)[1].rpartition("@")[2] or socket.gethostname()
    mail["Message-ID"] = make_msgid(domain=domain)
    session = "".join(c if c.isalnum() else "-" for c in message.session)
    mail["References"] = f"<traceml-{session}@{domain}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(words.body(message))
    return mail


def _run(place: Program, message: AlertMessage) -> None:
    environ = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    environ["TRACEML_SESSION"] = message.session
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                place.argv,
                env=environ,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise SendError(f"it cannot be started: {error.strerror}", again=False) from None
        _running.add(process)
        try:
            process.communicate(msgspec.json.encode(words.to_json(message)), place.timeout_s)
        except subprocess.TimeoutExpired:
            raise SendError(f"it has not ended within {place.timeout_s:g} s", again=False) from None
        finally:
            _end(process)
            _running.discard(process)
        if process.returncode:
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MOST_BODY))
            last = text.one_line(stderr.read().decode("utf-8", "replace").strip())
            raise SendError(f"exit code {process.returncode}" + (f": {last}" if last else ""), again=False)


_running: set[subprocess.Popen[bytes]] = set()
"""Commands that have not ended."""


@atexit.register
def _end_all() -> None:
    """End the commands that outlast this process."""
    for process in [*_running]:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command, and what it has started."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def _hidden(why: str, secrets: Sequence[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) > 3:
            why = why.replace(secret, "***")
    return text.masked(text.one_line(why))
