"""Alerts from the file to the places that they are sent to: real servers, real programs, real sessions."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import msgspec
import psutil
import pytest
from played import Played

from traceml_ray.analysis.labels import LABELS
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.verdict_shapes import verdict_info
from traceml_ray.cli import main
from traceml_ray.errors import Errors
from traceml_ray.monitor import sink_process
from traceml_ray.ray.actors import configure
from traceml_ray.settings import SettingError, Settings
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.memory.shapes import AttributionKind, Kind
from traceml_ray.sinks.alerts import alerting, words
from traceml_ray.sinks.alerts.alerting import Alerts
from traceml_ray.sinks.alerts.config import KNOWN, Email, Program, Webhook, parse, read_alerts, resolved
from traceml_ray.sinks.alerts.rules import AlertMessage, seen_of
from traceml_ray.sinks.alerts.send import SendError, mail_of, send, send_again, shown
from traceml_ray.sinks.alerts.trial import trial
from traceml_ray.sinks.process import Reporter, finish, opened
from traceml_ray.sinks.report import Report
from traceml_ray.sinks.table import wanted
from traceml_ray.store import query
from traceml_ray.views.session_poll import SessionPoll

ROOT = Path(__file__).parents[2]
NOW_NS = 1_764_209_600_000_000_000
MESSAGE = trial("a", "http://head:8050/{session}", NOW_NS)
SECRET = "s3cr3t-hook"


class Server:
    """An HTTP server that keeps what it is sent. It answers with `codes`, the last one from then on."""

    def __init__(self, *codes: int) -> None:
        self.bodies: list[Any] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.codes = [*codes] or [200]
        self.arrived = threading.Semaphore(0)
        self.let = threading.Event()
        self.let.set()
        taker = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                taker.requests.append((self.path, dict(self.headers)))
                taker.let.wait(240)
                code = taker.codes.pop(0) if len(taker.codes) > 1 else taker.codes[0]
                if code < 300:
                    taker.bodies.append(json.loads(body))
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(f"refused, {SECRET}".encode() if code >= 300 else b"ok")
                taker.arrived.release()

            def log_message(self, *_: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.let.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def server() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*codes: int) -> Server:
        servers.append(Server(*codes))
        return servers[-1]

    yield make
    for one in servers:
        one.close()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


# -- the file ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = ", "Invalid value"),
        ("", "it needs a destination"),
        ("to = 1", "to must be a table"),
        ("rules = 1", "'rules' is not known; did you mean rule? these are: rule, to, link"),
        ("[to.a]\nkind = 'slak'", "to.a.kind must be one of webhook, slack, alertmanager, email, command"),
        ("[to.a]\nkind = 'slack'", "to.a needs url or url_file"),
        ("[to.a]\nkind = 'slack'\nurl = 3", "to.a.url: expected `str`, got `int`"),
        ("[to.a]\nkind = 'slack'\nurll = 'x'", "to.a: 'urll' is not known; did you mean url?"),
        ("[to.a]\nkind = 'command'\nargv = []", "to.a.argv must not be empty"),
        ("[to.a]\nkind = 'email'\nhost = 'x'\nto = ['a']", "missing required field `from`"),
        ("[to.a]\nkind = 'slack'\nurl = 'x'\nper_hour = 0", "to.a.per_hour must be at least 1"),
        ("[to.a]\nkind = 'slack'\nurl = 'x'\ntimeout = 'long'", "to.a.timeout must be a number of seconds"),
        ("[to.a]\nkind='slack'\nurl='x'\n[[rule]]\nto = ['b']", "rule 1.to: 'b' is not known; these are: a"),
        ("[to.a]\nkind='slack'\nurl='x'\n[[rule]]\nlabels = ['stragler']", "did you mean straggler?"),
        (
            "[to.a]\nkind='slack'\nurl='x'\n[[rule]]\nseverity = 'bad'",
            "rule 1.severity: invalid enum value 'bad'",
        ),
    ],
)
def test_a_file_that_cannot_be_used_says_which_key_and_what_is_allowed(text: str, why: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse(text, "alerts.toml")
    assert str(caught.value).startswith("alerts.toml: ")
    assert why in str(caught.value)


def test_times_are_seconds_or_texts_with_a_unit() -> None:
    config = parse(
        "[to.a]\nkind='slack'\nurl='x'\n[[rule]]\nfor = 30\nresolve_after = '5min'\n[[rule]]\nfor='1.5h'"
    )
    assert [(rule.for_s, rule.resolve_after_s) for rule in config.rules] == [(30, 300), (5400, 300)]


def test_a_rule_may_name_every_label_that_a_finding_has() -> None:
    assert {*LABELS, *(f"memory_{kind}" for kind in get_args(Kind) + get_args(AttributionKind))} <= {*KNOWN}
    sources = [path.read_text() for path in (ROOT / "traceml_ray" / "signals").rglob("view.py")]
    assert {label for source in sources for label in re.findall(r'label="(\w+)"', source)} <= {*KNOWN}


def test_the_file_is_read_where_the_session_is_started_and_handed_over_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "alerts.toml"
    path.write_text("[to.team]\nkind = 'slack'\nurl = '${SLACK_URL}'")
    read = read_alerts(Settings(alerts=str(path)), {"SLACK_URL": SECRET})
    assert "${SLACK_URL}" in (read.alerts or "")
    assert SECRET not in (read.alerts or "")
    assert read_alerts(read, {}) == read, "a text stays as it is"
    assert "alerts" not in read.changed(), "it may hold secrets: the session file does not"
    with pytest.raises(SettingError, match="No such file"):
        read_alerts(Settings(alerts=str(tmp_path / "nothing.toml")), {})
    assert read_alerts(Settings(), {}) == Settings()


def test_a_driver_hands_over_the_text(tmp_path: Path) -> None:
    path = tmp_path / "alerts.toml"
    path.write_text("[to.team]\nkind = 'slack'\nurl = '${SLACK_URL}'")
    assert configure(Settings(alerts=str(path))).settings.alerts == path.read_text() + "\n"
    path.write_text("[to.team]\nkind = 'slak'")
    with pytest.raises(SettingError, match=r"alerts.toml: to.team.kind must be one of"):
        configure(Settings(alerts=str(path)))


def test_one_variable_is_enough() -> None:
    url = "http://place/${x}"
    read = read_alerts(Settings(), {"TRACEML_ALERT_SLACK": url, "TRACEML_ALERT_WEBHOOK": "http://other"})
    config = parse(read.alerts or "")
    assert [one.name for one in config.destinations] == ["webhook", "slack"]
    place, _ = resolved(config.destinations[1].place, {})
    assert getattr(place, "url", None) == url, "it is no place for variables"
    assert [rule.severity for rule in config.rules] == ["critical", "warning"]


def test_secrets_are_variables_and_files(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(f"{SECRET}\n")
    text = f"""
    [to.a]
    kind = "email"
    host = "mail"
    to = ["a@b.c"]
    from = "t@b.c"
    user = "${{LOGIN}}"
    password_file = "{tmp_path / "password"}"
    """
    place, secrets = resolved(parse(text).destinations[0].place, {"LOGIN": "somebody"})
    assert isinstance(place, Email)
    assert (place.user, place.password, place.to) == ("somebody", SECRET, ("a@b.c",))
    assert {SECRET, "somebody"} <= {*secrets}
    with pytest.raises(SettingError, match="the variable LOGIN is not set where the alerts are sent from"):
        resolved(parse(text).destinations[0].place, {})


# -- one message to one place -----------------------------------------------------------------


def test_a_webhook_gets_json(server: Callable[..., Server]) -> None:
    place = server()
    send(Webhook(url=f"{place.url}/x", headers={"Authorization": "Bearer abc"}), MESSAGE)
    (body,) = place.bodies
    assert (body["session"], body["test"], body["alerts"][0]["status"]) == ("test", True, "firing")
    assert body["alerts"][0]["findings"][0]["ranks"] == [5]
    path, headers = place.requests[0]
    assert (path, headers["Authorization"]) == ("/x", "Bearer abc")


@pytest.mark.parametrize(("code", "again"), [(404, False), (302, False), (429, True), (503, True)])
def test_a_refusal_says_whether_to_try_again_and_holds_no_secret(
    server: Callable[..., Server], code: int, again: bool
) -> None:
    place = server(code)
    with pytest.raises(SendError) as caught:
        send(Webhook(url=f"{place.url}/{SECRET}?token={SECRET}"), MESSAGE, [SECRET])
    assert caught.value.again is again
    assert str(caught.value) == f"it answered {code}: refused, ***"
    assert len(place.requests) == 1, "a redirection is not followed"


def test_nobody_there_is_tried_again_and_a_url_that_is_none_is_not() -> None:
    with pytest.raises(SendError, match="Connection refused") as caught:
        send(Webhook(url=f"http://127.0.0.1:{closed_port()}/{SECRET}"), MESSAGE)
    assert caught.value.again
    for url in ("file:///etc/passwd", SECRET, "http://[::1", ""):
        with pytest.raises(SendError) as caught:
            send(Webhook(url=url), MESSAGE, [SECRET])
        assert not caught.value.again
        assert SECRET not in str(caught.value)


def test_what_passes_is_tried_again_and_what_does_not_is_given_up(server: Callable[..., Server]) -> None:
    ending = threading.Event()
    passing, refusing, dead = server(500, 503, 200), server(400), server(500)
    send_again(Webhook(url=passing.url), MESSAGE, (), ending, [0.0] * 6)
    assert (len(passing.requests), len(passing.bodies)) == (3, 1)
    for place, attempts in ((refusing, 1), (dead, 7)):
        with pytest.raises(SendError):
            send_again(Webhook(url=place.url), MESSAGE, (), ending, [0.0] * 6)
        assert len(place.requests) == attempts


def test_an_answer_that_is_no_http_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(b"220 mail ready\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(SendError) as caught:
            send(Webhook(url=f"http://127.0.0.1:{listening.getsockname()[1]}"), MESSAGE)
    assert caught.value.again


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://hooks.slack.com/services/T0/B0/abc", "https://hooks.slack.com"),
        ("http://user:pass@host:9093/x?token=a#b", "http://host:9093"),
        ("http://[::1]:80/x", "http://[::1]:80"),
        ("http://host:port/", "a URL that cannot be read"),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, expected: str) -> None:
    assert shown(url) == expected


class Mailbox:
    """
    A small SMTP server for one mail.

    Args:
        certificate: folder with the key and the certificate for STARTTLS; None: it has no STARTTLS.
        refuses: the answers to commands, by their first word.
    """

    def __init__(self, certificate: Path | None = None, **refuses: str) -> None:
        self._certificate = certificate
        self.lines: list[str] = []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self._refuses = refuses
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with self.listening, self.listening.accept()[0] as connection:
            connection.sendall(b"220 mail\r\n")
            if self._talk(connection) and self._certificate is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self._certificate / "cert", self._certificate / "key")
                with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as safe:
                    self.lines.append("(encrypted)")
                    self._talk(safe)

    def _talk(self, connection: socket.socket) -> bool:
        """Answer commands; return whether the rest is to be encrypted."""
        with connection.makefile("rwb", buffering=0) as file:
            inside = False
            for raw in file:
                line = raw.decode().rstrip("\r\n")
                self.lines.append(line)
                word = line.partition(" ")[0].upper()
                if inside:
                    inside = line != "."
                    reply = "" if inside else "250 queued"
                else:
                    inside = word == "DATA" and word not in self._refuses
                    reply = self._refuses.get(word) or self._reply(word)
                if reply:
                    file.write(f"{reply}\r\n".encode())
                if not inside and word in ("QUIT", "STARTTLS"):
                    return word == "STARTTLS"
        return False

    def _reply(self, word: str) -> str:
        features = "250-mail\r\n250-STARTTLS\r\n" if self._certificate else "250-mail\r\n"
        replies = {
            "EHLO": f"{features}250 AUTH PLAIN",
            "DATA": "354 go on",
            "AUTH": "235 ok",
            "QUIT": "221 bye",
        }
        return replies.get(word, "250 ok") if word != "STARTTLS" else "220 go on"


def email(mailbox: Mailbox, **fields: Any) -> Email:
    fields = {
        "host": "127.0.0.1",
        "to": ("a@b.c", "d@e.f"),
        "sender": "T <t@b.c>",
        "security": "none",
        "timeout_s": 240.0,
        **fields,
    }
    return Email(port=mailbox.port, **fields)


def test_an_email_has_the_message_as_plain_text() -> None:
    mailbox = Mailbox()
    send(email(mailbox, user="me", password="pw"), MESSAGE)
    mailbox.thread.join(240)
    assert any(line.startswith("AUTH PLAIN") for line in mailbox.lines)
    assert [line for line in mailbox.lines if line.startswith("rcpt")] == [
        "rcpt TO:<a@b.c>",
        "rcpt TO:<d@e.f>",
    ]
    assert f"Subject: {words.title(MESSAGE)}" in mailbox.lines
    assert "http://head:8050/test" in mailbox.lines


@pytest.mark.parametrize(
    ("refuses", "fields", "why", "again"),
    [
        ({"AUTH": "535 bad login"}, {"user": "me", "password": SECRET}, "it answered 535", False),
        ({"MAIL": "451 busy"}, {}, "it answered 451: busy", True),
        ({"RCPT": "550 nobody"}, {}, "it refused all recipients (550)", False),
        ({"RCPT": "450 later"}, {}, "it refused all recipients (450)", True),
        ({}, {"security": "starttls"}, "STARTTLS extension not supported", False),
    ],
)
def test_a_mail_that_is_refused_says_why(
    refuses: dict[str, str], fields: dict[str, Any], why: str, again: bool
) -> None:
    with pytest.raises(SendError) as caught:
        send(email(Mailbox(**refuses), **fields), MESSAGE, [SECRET])
    assert (why in str(caught.value), caught.value.again) == (True, again), str(caught.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_a_mail_is_encrypted_and_only_for_a_server_that_can_be_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command.split(), *names], cwd=tmp_path, check=True, capture_output=True, timeout=240)
    login = {"host": "localhost", "security": "starttls", "user": "me", "password": "pw"}
    mailbox = Mailbox(tmp_path)
    with pytest.raises(SendError, match="certificate verify failed") as caught:
        send(email(mailbox, **login), MESSAGE)
    assert not caught.value.again
    assert not any(line.startswith("AUTH") for line in mailbox.lines), "nobody is sent a password"
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert"))
    mailbox = Mailbox(tmp_path)
    send(email(mailbox, **login), MESSAGE)
    mailbox.thread.join(240)
    begin = mailbox.lines.index("(encrypted)")
    assert [line.split()[0] for line in mailbox.lines[:begin]] == ["ehlo", "STARTTLS"]
    assert f"Subject: {words.title(MESSAGE)}" in mailbox.lines[begin:]


def test_a_name_that_anybody_chose_adds_no_header_and_no_link() -> None:
    named = msgspec.structs.replace(MESSAGE, session="a\r\nBcc: x@y.z <!channel>")
    mail = mail_of(Email(host="h", to=("a@b.c",), sender="t@b.c"), named)
    assert mail["Bcc"] is None
    assert mail["Subject"].startswith("[TEST FIRING] a\\r\\nBcc")
    assert "<!channel>" not in json.dumps(words.to_slack(named))


def command(code: str, **fields: Any) -> Program:
    return Program(argv=(sys.executable, "-c", code, "$HOME; exit 7"), **{"timeout_s": 240.0, **fields})


def test_a_command_gets_json_on_stdin_few_variables_and_no_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    out = str(tmp_path / "out")
    code = "import json, os, sys; "
    code += f"json.dump([json.load(sys.stdin), sys.argv, [*os.environ]], open({out!r}, 'w'))"
    send(command(code), MESSAGE)
    body, argv, variables = json.loads((tmp_path / "out").read_text())
    assert (body["session"], argv[1]) == ("test", "$HOME; exit 7")
    assert {"PATH", "TRACEML_SESSION"} <= {*variables}
    assert "MY_TOKEN" not in variables


def test_a_command_that_fails_hangs_or_is_none_says_so() -> None:
    failing = f"import sys; sys.exit('no route to {SECRET}')"
    for place, why in (
        (command(failing), "exit code 1: no route to ***"),
        (command("import time; time.sleep(60)", timeout_s=0.2), "it has not ended within 0.2 s"),
        (Program(argv=("/nothing/there",)), "it cannot be started: No such file or directory"),
    ):
        with pytest.raises(SendError) as caught:
            send(place, MESSAGE, [SECRET])
        assert (str(caught.value), caught.value.again) == (why, False)


def test_alertmanager_gets_the_end_of_an_alert_and_keeps_the_reason_for_a_failed_run() -> None:
    (firing,) = MESSAGE.events
    for outcome, label, events, lasts_s in (
        ("running", "straggler", ["firing"], 300),
        ("failed", "straggler", ["ended"], 0),
        ("failed", "rank_lost", ["firing", "ended"], 3600),
        ("failed", "rank_lost", ["ended"], 3600),
        ("stopped", "hang", ["ended"], 0),
    ):
        alert = msgspec.structs.replace(firing.alert, label=label, ended_ns=NOW_NS)
        message = as_message(
            outcome=outcome,
            events=tuple(msgspec.structs.replace(firing, status=status, alert=alert) for status in events),
        )
        (posted,) = words.to_alertmanager(message, {"team": "ml"}, NOW_NS, 300)
        assert posted["labels"]["alertname"] == words.alert_name(label)
        assert posted["labels"]["team"] == "ml"
        began, end = (time_of(posted[key]) for key in ("startsAt", "endsAt"))
        assert (began, end) == (NOW_NS // 10**9, NOW_NS // 10**9 + lasts_s), (outcome, label, events)


def time_of(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


# -- a session --------------------------------------------------------------------------------

FINDING = Finding(key="straggler:5", signal="steps", label="straggler", severity="warning", ranks=(5,))


class Clock:
    def __init__(self) -> None:
        self.now_ns = NOW_NS

    def __call__(self) -> int:
        return self.now_ns


def report_of(clock: Clock, *findings: Finding, state: str = "live", outcome: str = "running") -> Report:
    over = state == "stored"
    return Report(
        made_ns=clock(), session="demo", state=state, over=over, run_over=over, run="r", run_name="r",
        world=8, step=100, total_steps=None, eta_s=None, verdict=VERDICT, findings=findings,
        episodes=(), figures=(), outcome=outcome,
    )  # fmt: skip


VERDICT = verdict_info(Verdict(label="straggler"))


@pytest.mark.parametrize(
    ("state", "label", "coverage", "known", "hidden"),
    [
        ("live", "healthy", 1.0, True, ""),
        ("waiting", "rank_lost", None, True, "slowness"),
        ("stale", "healthy", 1.0, False, ""),
        ("starting", "healthy", 1.0, False, ""),
        ("live", "telemetry_limited", 0.5, True, "steps slowness ranks"),
        ("live", "accounting_only", 1.0, True, "slowness"),
        ("live", "hang", 1.0, True, "slowness"),
        ("live", "straggler", 0.97, True, "ranks"),
        ("ending", "healthy", 1.0, True, "steps ranks"),
    ],
)
def test_a_report_says_what_is_known(
    state: str, label: Any, coverage: float | None, known: bool, hidden: str
) -> None:
    verdict = verdict_info(Verdict(label=label, coverage=coverage))
    report = msgspec.structs.replace(report_of(Clock(), state=state), verdict=verdict)
    seen = seen_of(report, NOW_NS, "demo")
    flags = {"steps": seen.steps_unknown, "slowness": seen.slowness_unknown, "ranks": seen.partial}
    assert (seen.findings is not None) is known
    assert " ".join(name for name, value in flags.items() if value) == hidden


AT_ONCE = "group = 0\ntimeout = 240\n"
"""Messages are not gathered, and a place that gets no core is waited for."""


def alerts_of(folder: Path, clock: Clock, *urls: str, rule: str = "") -> Alerts:
    folder.mkdir(exist_ok=True)
    tables = [f"[to.d{n}]\nkind = 'webhook'\nurl = '{url}'\n{AT_ONCE}" for n, url in enumerate(urls)]
    return Alerts(folder, parse("\n".join([rule, *tables])), {}, clock, [0.0])


ONE_RULE = "[[rule]]\nfor = 0\nresolve_after = 0\n"


def test_a_place_that_hangs_holds_up_no_other(server: Callable[..., Server], tmp_path: Path) -> None:
    slow, quick, clock = server(), server(), Clock()
    slow.let.clear()
    alerts = alerts_of(tmp_path / "demo", clock, slow.url, quick.url, rule=ONE_RULE)
    alerts.offer(report_of(clock, FINDING))
    assert quick.arrived.acquire(timeout=240)
    alerts.offer(report_of(clock))
    assert quick.arrived.acquire(timeout=240)
    assert [body["alerts"][0]["status"] for body in quick.bodies] == ["firing", "resolved"]
    assert slow.bodies == []
    slow.let.set()
    alerts.close(time.monotonic() + 240)
    assert [body["alerts"][0]["status"] for body in slow.bodies] == ["firing", "resolved"]
    assert (alerts.state().sent, alerts.state().failed) == (4, 0)


def test_the_state_of_the_sink_says_what_fails_and_holds_no_secret(
    server: Callable[..., Server], tmp_path: Path
) -> None:
    clock, refusing = Clock(), server(403)
    alerts = alerts_of(
        tmp_path / "demo",
        clock,
        f"{refusing.url}/{SECRET}",
        "${NOT_SET}",
        f"{server().url}/{SECRET}",
        rule=ONE_RULE,
    )
    alerts.offer(report_of(clock, FINDING))
    alerts.close(time.monotonic() + 240)
    state = alerts.state()
    assert (state.sent, state.failed) == (1, 3)
    assert "d0: SendError: it answered 403" in state.error
    assert "d1: the variable NOT_SET is not set" in state.error
    assert refusing.url in state.where
    assert SECRET not in repr(state) + (tmp_path / "demo" / alerting.FILE).read_text()


def test_a_restart_sends_nothing_again_but_what_did_not_arrive(
    server: Callable[..., Server], tmp_path: Path
) -> None:
    clock, place, late = Clock(), server(), server()
    late.let.clear()
    first = alerts_of(tmp_path / "demo", clock, place.url, late.url, rule=ONE_RULE)
    first.offer(report_of(clock, FINDING))
    assert place.arrived.acquire(timeout=240)
    while unsent(tmp_path / "demo") != {"d0": 0, "d1": 1}:
        time.sleep(0.01)
    second = alerts_of(tmp_path / "demo", clock, place.url, late.url, rule=ONE_RULE)
    late.let.set()
    second.offer(report_of(clock, FINDING))
    second.close(time.monotonic() + 240)
    first.close(time.monotonic() + 240)
    assert len(place.bodies) == 1
    assert {body["id"] for body in late.bodies} == {"demo/d1/1"}, "its id says that it is the same one"
    assert unsent(tmp_path / "demo") == {"d0": 0, "d1": 0}
    third = alerts_of(tmp_path / "demo", clock, place.url, late.url, rule=ONE_RULE)
    third.offer(report_of(clock))
    third.close(time.monotonic() + 240)
    assert [body["alerts"][0]["status"] for body in place.bodies] == ["firing", "resolved"]


def unsent(folder: Path) -> dict[str, int]:
    stored = json.loads((folder / alerting.FILE).read_bytes())
    return {name: len(messages) for name, messages in stored["unsent"].items()}


def test_a_report_that_grows_old_is_no_news(server: Callable[..., Server], tmp_path: Path) -> None:
    clock, place = Clock(), server()
    alerts = alerts_of(tmp_path / "demo", clock, place.url, rule="[[rule]]\nfor = 30\n")
    alerts.offer(report_of(clock, FINDING))
    while alerts._newest is None:
        time.sleep(0.01)
    clock.now_ns += 3600 * 10**9
    for _ in range(100):
        clock.now_ns += 10**9
        alerts.look()
    alerts.close(time.monotonic() + 240)
    assert place.bodies == []


def test_a_session_sends_its_straggler_and_its_end(server: Callable[..., Server], tmp_path: Path) -> None:
    place = server()
    played = Played(tmp_path / "demo")
    for _ in range(30):
        played.play()
    settings = Settings(alerts=f"{ONE_RULE}[to.a]\nkind = 'webhook'\nurl = '{place.url}'\n{AT_ONCE}")
    (kind,) = wanted(settings)
    session = SessionPoll(played.source, clock=played.clock, timer=played.clock.timer)
    sink = opened(kind, session, settings)
    Reporter(session, [sink], 4).tick()
    assert place.arrived.acquire(timeout=240), sink.state()
    (alert,) = [one for one in place.bodies[0]["alerts"] if one["label"] == "straggler"]
    assert alert["findings"][0]["ranks"] == [5]
    assert "rank 5" in place.bodies[0]["text"]
    played.end()
    played.aggregator.close()
    finish(played.folder, settings, [sink], within_s=240.0)
    assert {one["status"] for one in place.bodies[-1]["alerts"]} == {"ended"}
    assert place.bodies[-1]["session"] == "demo"
    assert place.bodies[-1]["outcome"] == "finished"


def test_a_command_that_is_under_way_ends_with_the_process_of_the_sinks() -> None:
    code = """
import sys, threading
from test_alerts import MESSAGE, command
from traceml_ray.sinks.alerts import send
endless = command("import time; time.sleep(600)", timeout_s=600.0)
threading.Thread(target=send.send, args=(endless, MESSAGE), daemon=True).start()
while not send._running:
    pass
print(*(process.pid for process in send._running))
"""
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=here, capture_output=True, text=True, timeout=240
    )
    assert ended.stdout.strip(), ended.stderr
    assert not psutil.pid_exists(int(ended.stdout))


def test_a_sinks_process_that_is_killed_goes_on_where_it_was(
    server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_process, "PAUSE_S", 0.1)
    place, played, errors = server(), Played(tmp_path / "demo"), Errors()
    for _ in range(30):
        played.play()
    settings = Settings(alerts=f"{ONE_RULE}[to.a]\nkind = 'webhook'\nurl = '{place.url}'\n{AT_ONCE}")
    process = sink_process.SinkProcess(played.folder, settings, played.aggregator.query, errors)

    def wait_for_sent(count: int) -> None:
        """Wait until the process has noted that it has sent so many messages."""
        deadline = time.monotonic() + 240
        while [one.sent for one in query.ask_one(played.source.reply, query.GetStatus()).sinks] != [count]:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    wait_for_sent(1)
    for child in psutil.Process().children():
        if "traceml_ray.sinks.apart" in child.cmdline():
            child.children()[0].kill()
    wait_for_sent(0)
    played.play()
    played.end()
    played.aggregator.close()
    process.end()
    process.join(240)
    statuses = [[one["status"] for one in body["alerts"]] for body in place.bodies]
    assert statuses == [["firing"], ["ended"]]
    assert [body["id"] for body in place.bodies] == ["demo/a/1", "demo/a/2"]
    assert errors, "that it had ended is counted"


# -- the command ------------------------------------------------------------------------------


def test_the_command_says_what_arrived(
    server: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, path = server(), server(404), tmp_path / "alerts.toml"
    path.write_text(f"[to.a]\nkind = 'slack'\nurl = '{good.url}/{SECRET}'")
    assert main(["alerts", "test", str(path)]) == 0
    assert f"a (slack {good.url}): arrived in" in capsys.readouterr().out
    assert good.bodies[0]["text"].startswith("[TEST FIRING]")
    with path.open("a") as file:
        file.write(
            f"\n[to.b]\nkind = 'webhook'\nurl = '{bad.url}/{SECRET}'\n[to.c]\nkind = 'slack'\nurl = '${{NO}}'"
        )
    assert main(["alerts", "test", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"b (webhook {bad.url}): failed: it answered 404: refused, ***"
    assert "c (slack): failed: the variable NO is not set" in lines[2]
    sent = len(good.bodies)
    assert main(["alerts", "check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "c: slack (NO: not set here)" in printed
    assert SECRET not in printed
    assert len(good.bodies) == sent


def test_the_command_refuses_what_is_no_file_of_alerts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRACEML_ALERTS", "TRACEML_ALERT_WEBHOOK", "TRACEML_ALERT_SLACK"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "alerts.toml"
    path.write_text("[to.a]\nkind = 'slak'")
    for words_given in (["check"], ["check", str(path)], ["test", str(tmp_path / "none")]):
        assert main(["alerts", *words_given]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert os.environ.get("TRACEML_ALERTS") is None


def as_message(**fields: Any) -> AlertMessage:
    return msgspec.structs.replace(MESSAGE, **fields)


def test_what_a_person_who_is_paged_reads(snapshot: Any) -> None:
    (firing,) = MESSAGE.events
    dead = msgspec.structs.replace(
        firing.alert.findings[0], label="rank_lost", severity="critical", stages=(), cost=None,
        from_step=None,
        why="Rank 5 died in step 1,204, in forward: SIGKILL.", next="Read the rank's own output.",
    )  # fmt: skip
    death = msgspec.structs.replace(
        firing.alert, key="dead", label="rank_lost", severity="critical", findings=(dead,)
    )
    ended = msgspec.structs.replace(
        firing, status="ended", alert=msgspec.structs.replace(firing.alert, ended_ns=NOW_NS + 400 * 10**9)
    )
    resolved_event = msgspec.structs.replace(ended, status="resolved")
    messages = [
        as_message(session="lr3", test=False),
        as_message(session="lr3", test=False, events=(resolved_event,), link=""),
        as_message(
            session="lr3", test=False, outcome="failed", dropped=2,
            events=(msgspec.structs.replace(firing, alert=death), ended),
        ),
    ]  # fmt: skip
    for message in messages:
        snapshot("alerts", f"{words.title(message)}\n\n{words.body(message)}")
