"""The token as a person gives it: in the address, or in the form, in a real browser."""

from __future__ import annotations

import functools
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import waitress
from looking import end, press, until
from played import Played
from selenium.webdriver.common.by import By

from traceml_ray.dash_app.server import create_app
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.views.serving import names_of


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    played = Played(tmp_path / "played", world=2, per_node=2, late=None)
    pages = SessionPages(played.source, clock=played.clock)
    played.play(5)
    pages.poll()
    app = create_app(pages, token="open-sesame", hosts=names_of("127.0.0.1"))
    listening = socket.create_server(("127.0.0.1", 0))
    server = waitress.create_server(app.server, sockets=[listening])
    threading.Thread(target=server.run, daemon=True).start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    end(server)


def shown(browser, id: str) -> bool:
    return bool(browser.find_elements(By.ID, id))


def give(browser, token: str) -> None:
    field = browser.find_element(By.NAME, "token")
    field.send_keys(token)
    field.submit()


def test_form_leads_to_the_page_that_was_asked_for(browser, url: str) -> None:
    browser.delete_all_cookies()
    browser.get(f"{url}/rank/1?run=job")
    assert not shown(browser, "verdict-strip")
    give(browser, "guessed")
    until(browser, lambda: "not the token" in browser.page_source)
    give(browser, "open-sesame")
    until(browser, lambda: shown(browser, "rank-title"))
    assert browser.current_url == f"{url}/rank/1?run=job"
    [cookie] = browser.get_cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")
    assert browser.execute_script("return document.cookie") == ""


def test_link_with_the_token_is_redirected_to_one_without(browser, url: str) -> None:
    browser.get(f"{url}/events?token=open-sesame&kind=exit")
    until(browser, lambda: shown(browser, "verdict-strip"))
    assert browser.current_url == f"{url}/events?kind=exit"
    browser.get(f"{url}/?token=wrong")
    until(browser, lambda: shown(browser, "verdict-strip") is False)
    assert "not the token" in browser.page_source


KEEP = "document.addEventListener('copy', ({ target }) => { window.copied = target.value; })"
BUTTON = "//div[@id='session']//button[text()='Copy link']"
CHOSEN = "/rank/1?from=2&to=4&step=3&off=stage-data.median+rank"


def test_copied_link_leads_a_colleague_to_the_same_page_after_the_token(browser, url: str) -> None:
    browser.delete_all_cookies()
    browser.get(f"{url}{CHOSEN}&token=open-sesame")
    until(browser, lambda: shown(browser, "rank-title"))
    browser.execute_script(KEEP)
    press(browser, By.XPATH, BUTTON)
    link = until(browser, lambda: browser.execute_script("return window.copied"))
    assert link.startswith(f"{url}{CHOSEN}&session=played&run=") and "open-sesame" not in link
    browser.delete_all_cookies()  # a colleague
    browser.get(link)
    give(browser, "open-sesame")
    until(browser, lambda: shown(browser, "rank-title"))
    assert browser.current_url == link
    shows = "return document.querySelector('#range-text').textContent"
    until(browser, lambda: browser.execute_script(shows).startswith("Steps 2–4 "))
    off = "return [...document.querySelectorAll('#stage-data-legend .off')].map((one) => one.textContent)"
    assert browser.execute_script(off) == ["median rank"]


@pytest.fixture
def other_site(tmp_path: Path) -> Iterator[str]:
    """A page of another site, in which a test writes."""
    pages = tmp_path / "site"
    pages.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(pages))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_link_on_another_site_asks_only_once_and_its_form_gets_nothing(
    browser, url: str, other_site: str, tmp_path: Path
) -> None:
    browser.delete_all_cookies()
    browser.get(f"{url}/?token=open-sesame")
    until(browser, lambda: shown(browser, "verdict-strip"))
    form = f'<form method="post" action="{url}/bundles"><button id="post">Post</button></form>'
    (tmp_path / "site/index.html").write_text(f'<a id="link" href="{url}/rank/1">Link</a>{form}')
    browser.get(other_site)
    press(browser, By.ID, "link")
    until(browser, lambda: shown(browser, "rank-title"))
    browser.get(other_site)
    press(browser, By.ID, "post")
    until(browser, lambda: "made by another page" in browser.page_source)
    browser.delete_all_cookies()
