"""What the dashboard's server sends over the wire: how much of it, and how often."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from traceml_ray.dash_app.server import create_app
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.views.source import open_source

PACKED = {"Accept-Encoding": "gzip, deflate, br"}
ASSETS = Path(__file__).parents[2] / "dash_app/assets"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> FlaskClient:
    out = str(tmp_path_factory.mktemp("out"))
    app = create_app(SessionPages(open_source(None, out, None)), token=None, hosts=["localhost"])
    made: FlaskClient = app.server.test_client()
    return made


def loaded(client: FlaskClient) -> list[str]:
    """Return the URLs that the page loads."""
    return re.findall(r'(?:src|href)="(/[^"]+)"', client.get("/").text)


def test_files_of_the_page_are_packed_and_asked_for_once(client: FlaskClient) -> None:
    answers = {url: client.get(url, headers=PACKED) for url in loaded(client)}
    assert {"/assets/app.js", "/assets/plotly.min.js"} <= {url.partition("?")[0] for url in answers}
    assert all(answer.status_code == 200 for answer in answers.values())
    for url, answer in answers.items():
        assert answer.headers["Cache-Control"] == "private, max-age=31536000, immutable", url
        assert answer.headers["Vary"] == "Accept-Encoding", url
        assert gzip.decompress(answer.data) == client.get(url).data
    assert sum(len(answer.data) for answer in answers.values()) < 750_000


def test_what_names_no_version_is_not_kept(client: FlaskClient) -> None:
    for url in ("/", "/_dash-layout", "/_dash-dependencies", "/health", "/metrics"):
        assert client.get(url).headers["Cache-Control"] == "no-store"
    for url in ("/assets/app.js", "/_dash-component-suites/dash/dcc/async-graph.js"):
        answer = client.get(url, headers=PACKED)
        assert answer.headers["Cache-Control"] == "private, no-cache"
        again = client.get(url, headers={**PACKED, "If-None-Match": answer.headers["ETag"]})
        assert (again.status_code, again.data) == (304, b"")


@pytest.mark.parametrize("accepted", ["", "identity", "br", "gzip;q=0"])
def test_answer_is_plain_for_who_does_not_take_gzip(client: FlaskClient, accepted: str) -> None:
    answer = client.get("/", headers={"Accept-Encoding": accepted})
    assert "Content-Encoding" not in answer.headers
    assert answer.text.startswith("<!DOCTYPE html>")


def test_bundle_of_plotly_has_its_version_traces_and_licences() -> None:
    banner = (ASSETS / "plotly.min.js").read_text().partition("\n")[0]
    version = re.match(r"/\* plotly\.js@(\S+) with scatter, bar, heatmap; ", banner)
    assert version
    licences = (ASSETS / "plotly.LICENSE.txt").read_text()
    assert f"plotly.js {version[1]} (MIT)\n\nMIT License" in licences
    assert "Redistributions in binary form must reproduce" in licences  # of d3
