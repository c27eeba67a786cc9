"""Requests to the dashboard that no browser of ours makes: paths, queries, headers, cookies, bodies."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from flask import Flask
from fuzzing import bounded, fuzz, json_values, mutated
from hypothesis import example, given
from hypothesis import strategies as st
from sessions import Rank, Relay, aggregation, refresh_request

from traceml_ray.dash_app import security
from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.route import Route
from traceml_ray.dash_app.server import create_app
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.views.serving import names_of
from traceml_ray.views.source import SourceError, open_source

TOKEN = "a-Token_that.is-long"
HOST = {"HTTP_HOST": "localhost"}
UPDATE = "/_dash-update-component"
OPEN = ("/health",)

header_text = st.text(st.characters(max_codepoint=255, exclude_characters="\\r\\n\\0"), max_size=60)
hosts = header_text | st.sampled_from(
    ["[", "[::1", "a@b", "localhost:", "localhost:99999999", "localhost:é", "//", "%00"]
)
paths = (
    st.text(max_size=40).map("/".__add__)
    | st.sampled_from(
        ["//evil.example", "/%00", "/rank/", "/rank/9" * 9, "/node/%2e%2e", "/assets/%00", "/assets/..%2f"]
    )
    | st.sampled_from(["/", "/health", "/metrics", "/login", "/_dash-layout", "/_dash-dependencies", UPDATE])
)
queries = st.text(max_size=40) | st.dictionaries(
    st.sampled_from(["run", "session", "stage", "span", "kind", "rank", "node", "a", "b", "next", "token"]),
    st.text(max_size=20) | st.sampled_from(["-1", "9" * 400, "..", "/etc/passwd", "nan", "1e999", "٣"]),
    max_size=4,
).map(lambda given: "&".join(f"{name}={value}" for name, value in given.items()))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionPages]:
    logging.disable(logging.CRITICAL)
    folder = tmp_path_factory.mktemp("out") / "stored"
    aggregator, relay, ranks = aggregation(folder), Relay(), [Rank(0), Rank(1)]
    for _ in range(6):
        aggregator.ingest(relay.message(*(rank.batch(10) for rank in ranks)))
    aggregator.commit()
    aggregator.close()
    made = SessionPages(open_source(str(folder), str(folder.parent), None))
    made.poll()
    yield made
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def opened(pages: SessionPages) -> Flask:
    return create_app(pages, token=None, hosts=names_of("127.0.0.1")).server  # type: ignore[return-value]


@pytest.fixture(scope="module")
def closed(pages: SessionPages) -> Flask:
    return create_app(pages, token=TOKEN, hosts=names_of("127.0.0.1")).server  # type: ignore[return-value]


def ask(
    server: Flask, path: str, query: str = "", method: str = "GET", body: bytes = b"", **headers: str
) -> Any:
    """The answer of the application itself, as waitress would call it: bytes of the request as Latin-1."""
    environ = {**HOST, **headers, "PATH_INFO": path.encode(errors="reroute").decode("latin-1")}
    environ["QUERY_STRING"] = query.encode(errors="reroute").decode("latin-1")
    with bounded():
        answer = server.test_client(use_cookies=False).open(
            "/", method=method, data=body, environ_overrides=environ, content_type=headers.get("CONTENT_TYPE")
        )
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert "Traceback" not in answer.text
    return answer


@fuzz(2)
@given(paths, queries, st.sampled_from(["GET", "HEAD", "POST"]), header_text)
@example("/", "session=..", "GET", "")
def test_requests_to_any_address_are_answered_without_a_server_error(
    opened: Flask, path: str, query: str, method: str, accept: str
) -> None:
    answer = ask(opened, path, query, method, HTTP_ACCEPT=accept)
    assert answer.status_code < 500 or path == UPDATE, (answer.status_code, answer.text[:300])
    assert "root:" not in answer.text


@fuzz(2)
@given(paths, queries, hosts | st.just("localhost"), st.lists(header_text, min_size=4, max_size=4), st.data())
def test_requests_without_the_token_are_refused(
    closed: Flask, path: str, query: str, host: str, secrets: list[str], data: st.DataObject
) -> None:
    proof = security.Guard(TOKEN, [])
    cookie = data.draw(
        st.sampled_from([secrets[0], f"{proof._cookie}={secrets[0]}", f"{proof._cookie}={proof._proof}x"])
    )
    bearer = data.draw(
        st.sampled_from([secrets[1], f"Bearer {secrets[1]}", f"bearer {TOKEN} x", f"Basic {TOKEN}"])
    )
    method = data.draw(st.sampled_from(["GET", "HEAD", "POST"]))
    more = {"HTTP_HOST": host, "HTTP_COOKIE": cookie, "HTTP_AUTHORIZATION": bearer, "HTTP_ORIGIN": secrets[2]}
    answer = ask(closed, path, query, method, f"token={secrets[3]}".encode(), **more)
    refused = answer.status_code in (400, 401, 403, 404, 405, 421)
    assert refused or (path in OPEN and answer.status_code == 200), (answer.status_code, answer.text[:300])
    assert "Set-Cookie" not in answer.headers


@fuzz()
@given(
    mutated(json.dumps(refresh_request()).encode(), [b"[" * 50_000, b"null", b"1e999", b'"\\ud800"', b"{}"])
)
def test_callback_with_any_body_leaves_the_server_running(opened: Flask, body: bytes) -> None:
    """What Dash itself cannot make sense of is its 500; nothing of it reaches the pages, or is shown."""
    answer = ask(opened, UPDATE, method="POST", body=body, CONTENT_TYPE="application/json")
    assert len(answer.text) < 1 << 20
    assert ask(opened, "/health").status_code == 200


@fuzz()
@given(st.none() | st.text(max_size=20) | json_values, st.none() | json_values, json_values, st.data())
def test_callback_with_any_values_succeeds(
    opened: Flask, pathname: Any, search: Any, seen: Any, data: st.DataObject
) -> None:
    values = [data.draw(json_values), pathname, search, data.draw(json_values | paths)]
    body = refresh_request(*values, seen=seen)
    answer = ask(
        opened, UPDATE, method="POST", body=json.dumps(body).encode(), CONTENT_TYPE="application/json"
    )
    assert answer.status_code == 200, answer.text[:300]


@fuzz(2)
@given(paths, queries, json_values, json_values)
@example("/", "", {"page": [], "sums": [], "heat": {}}, {"ranks": [1 << 70], "first": -1, "last": None})
@example("/", "", {"sums": {"x": {}}, "heat": {"id": []}}, {"ranks": [0, 9], "first": 0, "last": 1 << 62})
def test_refresh_with_any_browser_state_is_answered(
    pages: SessionPages, path: str, query: str, seen: Any, asked: Any
) -> None:
    refresher = Refresher(pages)
    with bounded(mib=64):
        _, content = refresher.refresh(path, "?" + query, seen)
        cell = refresher.cell(asked, "?" + query)
    assert {"seen", "set"} <= content.keys()
    assert cell is None or isinstance(cell, str)
    assert len(json.dumps(content, default=str)) < 1 << 20


@fuzz(4)
@given(st.text(max_size=60) | paths, st.text(max_size=200) | queries)
def test_route_of_any_address_round_trips_or_is_none(path: str, search: str) -> None:
    with bounded(mib=16):
        route = Route.parse(path, search)
        if route is not None:
            again = Route.parse(*route.here().partition("?")[::2])
            assert again is None or again.page == route.page
            msgspec.json.encode(route)


def test_session_outside_the_folder_cannot_be_chosen(pages: SessionPages, tmp_path: Path) -> None:
    for name in ("..", "../..", "/etc", str(tmp_path), "stored/../stored", "\0", "x" * 5000, ""):
        with pytest.raises(SourceError):
            pages._other(name)
