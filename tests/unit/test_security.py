"""Who may look at the dashboard: asked over real sockets, of the server as it is run."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import waitress
from sessions import Rank, Relay, aggregation

from traceml_ray.dash_app import process, security
from traceml_ray.dash_app.server import create_app
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.settings import SettingError
from traceml_ray.views.serving import is_named, names_of
from traceml_ray.views.source import open_source

TOKEN = "a-Token_that.is-long"
POST = {"Content-Type": "application/x-www-form-urlencoded"}


class Server:
    """The dashboard of a stored session on a free port."""

    def __init__(self, folder: Path, token: str | None, hosts: list[str]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        pages = SessionPages(open_source(str(folder), str(folder.parent), None))
        pages.poll()
        app = create_app(pages, token=token, hosts=hosts)
        self._waitress: Any = waitress.create_server(
            app.server, sockets=[self._listening], **process._WAITRESS
        )
        self._thread = threading.Thread(target=self._waitress.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._waitress.close()
        self._listening.close()

    def ask(
        self, method: str, path: str, body: bytes | str | None = None, **headers: str
    ) -> http.client.HTTPResponse:
        """Return the answer, with its `body` and headers; redirects are not followed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path, body, named)
            answer: Any = connection.getresponse()
            answer.body = answer.read().decode(errors="replace")
        return answer

    def raw(self, data: bytes) -> bytes:
        """Return the first answer to these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=240) as connection:
            answer = b""
            with contextlib.suppress(OSError):  # it may have hung up on us
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while more := connection.recv(1 << 16):
                    answer += more
            return answer


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "stored"
    aggregator, relay, rank = aggregation(folder), Relay(), Rank(0, 1)
    aggregator.ingest(relay.message(rank.batch(20)))
    aggregator.commit()
    return folder


@pytest.fixture(scope="module")
def closed(stored: Path) -> Iterator[Server]:
    """One that asks for a token."""
    server = Server(stored, TOKEN, names_of("127.0.0.1"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def opened(stored: Path) -> Iterator[Server]:
    """One on loopback without a token."""
    server = Server(stored, None, names_of("127.0.0.1"))
    yield server
    server.close()


def cookie(server: Server) -> str:
    given = server.ask("GET", f"/?token={TOKEN}").getheader("Set-Cookie")
    assert given is not None
    return given.partition(";")[0]


PATHS = [
    "/",
    "/login",
    "/health/",
    "/rank/0",
    "/metrics",
    "/_dash-layout",
    "/_dash-dependencies",
    "/no/such/page",
    "/assets/x.css",
]


@pytest.mark.parametrize("path", PATHS)
def test_requests_without_the_token_get_no_data(closed: Server, path: str) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {TOKEN}é"},
        {"Cookie": f"token={TOKEN}"},
        {"Cookie": cookie(closed)[:-1]},
        {"Cookie": cookie(closed).partition("=")[0] + f"={TOKEN}"},
    ):
        answer = closed.ask("GET", path, **headers)
        assert (answer.status, answer.getheader("WWW-Authenticate")) == (401, "Bearer")
        assert answer.getheader("Set-Cookie") is None
        assert "stored" not in answer.body and "0.1" not in answer.body


@pytest.mark.parametrize("path", ["/", "/metrics", "/_dash-layout", "/rank/0"])
def test_token_is_accepted_as_header_and_as_cookie(closed: Server, path: str) -> None:
    assert closed.ask("GET", path, Authorization=f"Bearer {TOKEN}").status == 200
    assert closed.ask("GET", path, Cookie=cookie(closed)).status == 200


def test_callbacks_need_the_token_and_the_own_origin(closed: Server, opened: Server) -> None:
    path, json = "/_dash-update-component", {"Content_Type": "application/json"}
    assert closed.ask("POST", path, "{}", **json).status == 401
    assert closed.ask("POST", path, "not json", **json, Cookie=cookie(closed)).status == 400
    for server, who in ((closed, {"Cookie": cookie(closed)}), (opened, {})):
        for origin in ("http://evil.example", f"http://127.0.0.1:{server.port + 1}", "null"):
            assert server.ask("POST", path, "{}", **json, **who, Origin=origin).status == 403
        ours = f"http://127.0.0.1:{server.port}"
        assert server.ask("POST", path, "not json", **json, **who, Origin=ours).status == 400


def test_malformed_origin_is_refused(opened: Server) -> None:
    answer = opened.ask("POST", "/_dash-update-component", "{}", Origin="http://[")
    assert answer.status == 403


def test_token_in_the_address_is_swapped_for_a_cookie(closed: Server) -> None:
    answer = closed.ask("GET", f"/rank/3?run=a%26b&token={TOKEN}&stage=data&stage=")
    assert (answer.status, answer.getheader("Location")) == (303, "/rank/3?run=a%26b&stage=data&stage=")
    given = answer.getheader("Set-Cookie") or ""
    assert re.search(r"; HttpOnly(;|$)", given)
    assert re.search(r"; SameSite=Lax(;|$)", given)
    assert TOKEN not in given + answer.body
    assert "Max-Age" not in given and "Expires" not in given


def test_token_is_taken_out_of_the_address_where_none_is_asked_for(opened: Server) -> None:
    answer = opened.ask("GET", "/rank/3?run=a&token=of-another-dashboard")
    assert (answer.status, answer.getheader("Location")) == (303, "/rank/3?run=a")
    assert answer.getheader("Set-Cookie") is None


def test_wrong_token_is_refused_even_with_a_good_cookie(closed: Server) -> None:
    for given in ("wrong", "", TOKEN[:-1], TOKEN + "x", "%C3%A9", "%00"):
        assert closed.ask("GET", f"/?token={given}", Cookie=cookie(closed)).status == 401
    assert closed.ask("GET", f"/?token=wrong&token={TOKEN}").status == 401


def test_login_form_leads_to_the_requested_page(closed: Server) -> None:
    asked = closed.ask("GET", '/rank/3?run="<b>', Accept="text/html")
    assert asked.status == 401
    action = re.search(r'<form method="post" action="([^"]*)">', asked.body)
    assert action is not None
    assert "<b>" not in asked.body
    path = action[1].replace("&amp;", "&")
    wrong = closed.ask("POST", path, "token=wrong", **POST)
    assert (wrong.status, wrong.getheader("Set-Cookie")) == (401, None)
    assert action[1] in wrong.body
    assert closed.ask("POST", path).status == 401
    right = closed.ask("POST", path, f"token={TOKEN}", **POST)
    assert (right.status, right.getheader("Location")) == (303, "/rank/3?run=%22%3Cb%3E")
    given = (right.getheader("Set-Cookie") or "").partition(";")[0]
    assert closed.ask("GET", "/", Cookie=given).status == 200


ELSEWHERE = [
    "//evil.example/x",
    "https://evil.example/x",
    "\\\\evil.example",
    "///evil.example",
    "/\\evil.example",
    "//[",
]


@pytest.mark.parametrize("target", ELSEWHERE)
def test_redirects_never_lead_to_another_server(closed: Server, target: str) -> None:
    for answer in (
        closed.ask("POST", f"/login?next={quote(target, safe='')}", f"token={TOKEN}", **POST),
        closed.ask("GET", f"{quote(target)}?token={TOKEN}"),
    ):
        location = answer.getheader("Location")
        assert answer.status == 303
        assert location is not None and re.match(r"/([^/\\]|$)", location)


@pytest.mark.parametrize(
    "text", ["%0d%0aX-Injected:%20yes", "%0aSet-Cookie:%20a=b", "%E5%98%8A%E5%98%8DX-Injected:y"]
)
def test_redirects_carry_no_injected_header(closed: Server, text: str) -> None:
    for answer in (
        closed.ask("GET", f"/{text}?token={TOKEN}"),
        closed.ask("GET", f"/?a={text}&token={TOKEN}"),
        closed.ask("GET", f"/?{text}=b&token={TOKEN}"),
        closed.ask("POST", f"/login?next=/{text}", f"token={TOKEN}", **POST),
        closed.ask("POST", f"/login?next=/%3F{text}", f"token={TOKEN}", **POST),
    ):
        assert answer.status == 303
        assert answer.getheader("X-Injected") is None
        assert (answer.getheader("Set-Cookie") or "").startswith("traceml-")


def test_cookies_of_two_dashboards_on_one_host_do_not_collide() -> None:
    one, two = security.Guard("one", []), security.Guard("two", [])
    assert one._cookie != two._cookie and one._proof != two._proof


def test_health_is_open_and_reveals_nothing_private(closed: Server) -> None:
    answer = closed.ask("GET", "/health")
    assert answer.status == 200
    assert answer.getheader("Content-Type") == "application/json"
    assert not re.search(r"host|rank|session|/|\bpid\b|stored/", answer.body), answer.body
    assert TOKEN not in answer.body


def test_metrics_are_prometheus_text(opened: Server) -> None:
    answer = opened.ask("GET", "/metrics")
    assert (answer.status, answer.getheader("Content-Type")) == (
        200,
        "text/plain; version=0.0.4; charset=utf-8",
    )


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.", "10.0.0.1", "", "[::1", "a@b", "0"]
)
def test_foreign_host_is_refused_everywhere(opened: Server, closed: Server, host: str) -> None:
    for server in (opened, closed):
        for path in ("/", "/health", f"/?token={TOKEN}"):
            answer = server.ask("GET", path, Host=host)
            assert (answer.status, answer.getheader("Set-Cookie")) == (421, None)
            assert answer.getheader("Content-Security-Policy")
    assert opened.raw(b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 421")


@pytest.mark.parametrize("host", ["127.0.0.1", "LocalHost:9000", "[::1]:80"])
def test_own_host_names_are_accepted_at_any_port(opened: Server, host: str) -> None:
    assert opened.ask("GET", "/health", Host=host).status == 200


def test_guard_on_every_address_accepts_addresses_but_no_foreign_names() -> None:
    names = {name.lower() for name in names_of("0.0.0.0")}
    ours = ["10.1.2.3:8050", "[fe80::1]:1", "localhost", socket.gethostname()]
    assert all(is_named(host, names) for host in ours)
    assert not any(is_named(host, names) for host in ["evil.example", "10.1.2.3.evil.example", ""])
    assert not is_named("192.0.2.8", names_of("192.0.2.7"))


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/metrics",
        "/no",
        "/_dash-layout",
        "/assets/no.css",
        "/_dash-component-suites/dash/no.js",
    ],
)
def test_security_headers_are_on_every_answer(opened: Server, closed: Server, path: str) -> None:
    for server in (opened, closed):
        answer = server.ask("GET", path)
        assert answer.status in (200, 401, 404)
        assert answer.getheader("X-Frame-Options") == "DENY"
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert answer.getheader("Referrer-Policy") == "same-origin"
        assert answer.getheader("Cache-Control")
        assert answer.getheader("Access-Control-Allow-Origin") is None
        assert answer.getheader("Server") is None
        policy = answer.getheader("Content-Security-Policy") or ""
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        scripts = policy.partition("script-src ")[2].partition(";")[0]
        assert "unsafe" not in scripts and "http" not in policy


def test_content_policy_allows_exactly_the_scripts_of_the_page(opened: Server) -> None:
    answer = opened.ask("GET", "/")
    policy = answer.getheader("Content-Security-Policy") or ""
    page = re.sub(r"<!--.*?-->", "", answer.body, flags=re.S)
    inline = re.findall(r'<script(?: id="_dash-renderer"[^>]*)?>(.*?)</script>', page, re.S)
    hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline}
    assert hashes and set(re.findall(r"'sha256-([^']+)'", policy)) == hashes
    loaded = re.findall(r'(?:src|href)="(?!data:image/)([^"]*)"', answer.body)
    assert len(loaded) > 5
    assert all(re.match(r"/[^/]", path) for path in loaded)  # nothing from any other server
    for path in loaded:
        assert opened.ask("GET", path.replace("&amp;", "&")).status == 200, path


UP = ["..", "%2e%2e", "..%2f..", "%2e%2e%2f", "..%5c..", "....//..", "%252e%252e", "/etc"]


@pytest.mark.parametrize("up", UP)
def test_asset_paths_cannot_leave_their_folder(opened: Server, up: str) -> None:
    for base in ("/assets/", "/_dash-component-suites/dash/", "/_dash-component-suites/"):
        for path in (
            f"{base}{up}/{up}/{up}/{up}/etc/passwd",
            f"{base}{up}/security.py",
            f"{base}{up}/__init__.py",
        ):
            answer = opened.ask("GET", path)
            assert answer.status == 404 or "_dash-config" in answer.body, path  # unknown pages are the app's
            assert "root:" not in answer.body and "import" not in answer.body
            assert "Traceback" not in answer.body


@pytest.mark.parametrize(
    "method", ["TRACE", "OPTIONS", "PUT", "DELETE", "PATCH", "CONNECT", "PROPFIND", "GARBAGE"]
)
def test_other_http_methods_are_refused(opened: Server, closed: Server, method: str) -> None:
    for server in (opened, closed):
        answer = server.ask(method, "/", X_Echo="echo")
        assert answer.status == 405
        assert "echo" not in answer.body
        assert answer.getheader("Allow") == "GET, HEAD, POST"
    assert opened.ask("POST", "/").status == 405
    assert opened.ask("HEAD", "/").status == 200


def test_large_bodies_are_refused(opened: Server, closed: Server) -> None:
    start = b"POST /_dash-update-component HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    large = security.MAX_BODY_BYTES + 1
    for server in (opened, closed):
        assert server.raw(start + b"Content-Length: %d\r\n\r\n" % large).startswith(b"HTTP/1.1 413")
        chunk = b"%x\r\n" % large + b"x" * large + b"\r\n0\r\n\r\n"
        assert server.raw(start + b"Transfer-Encoding: chunked\r\n\r\n" + chunk).startswith(b"HTTP/1.1 413")
        assert server.raw(start + b"X: " + b"x" * (1 << 17) + b"\r\n\r\n").startswith(b"HTTP/1.0 431")
        assert server.ask("GET", "/health").status == 200


@pytest.mark.parametrize(
    "body", ["", "[]", "{}", "null", '{"output": "x.y"}', '{"output": "..a.b..", "inputs": 3}']
)
def test_malformed_callback_gets_no_traceback(opened: Server, body: str) -> None:
    answer = opened.ask("POST", "/_dash-update-component", body, Content_Type="application/json")
    assert answer.status >= 400
    assert not re.search(r"Traceback|\.py|File ", answer.body), answer.body


def test_callback_without_a_token_accepts_only_json(opened: Server) -> None:
    """A form of another site, which browsers send without asking, is no callback."""
    answer = opened.ask("POST", "/_dash-update-component", "{}", Content_Type="text/plain")
    assert answer.status == 415


def test_token_is_required_outside_loopback() -> None:
    for host in ("127.0.0.1", "localhost", "127.0.0.9", "::1"):
        assert security.choose_token(None, host) == (None, False)
        assert security.choose_token("given", host) == ("given", False)
    for host in ("0.0.0.0", "::", "192.0.2.7"):
        assert security.choose_token("given", host) == ("given", False)
        (one, made_up), (two, _) = security.choose_token(None, host), security.choose_token(None, host)
        assert made_up and one != two and len(one or "") >= 32


@pytest.mark.parametrize("token", ["", " ", "a b", "a\n", "é", "\0"])
def test_token_that_cannot_be_sent_is_refused(token: str) -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(SettingError, match="token must be"):
            security.choose_token(token, host)


def test_host_without_an_address_is_named_in_the_error() -> None:
    with pytest.raises(SettingError, match="host='no such host' has no address"):
        security.choose_token(None, "no such host")
