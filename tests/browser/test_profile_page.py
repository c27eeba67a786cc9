"""The pages of profiles in Chromium, with one that torch's profiler has recorded."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from looking import Served, press, text, until
from played import Played
from profiled import stored
from recorded import profiled, training
from selenium import webdriver
from selenium.webdriver.common.by import By

from traceml_ray.store import profiles

WIDTH = "return document.documentElement.scrollWidth - window.innerWidth"
SMALL = """return [...document.querySelectorAll('#view a, #view button, #view input, #view summary')]
  .map((one) => [one.outerHTML.slice(0, 80), one.closest('label') ?? one])
  .map(([html, one]) => [html, one.getBoundingClientRect()])
  .filter(([, box]) => box.width && (box.height < 24 || box.width < 24)).map(([html]) => html)"""
NAMES = (
    "return [...document.querySelectorAll('#profile-operations td:nth-child(3)')].map(one => one.innerText)"
)


def recorded(path: Path) -> None:
    """Write what torch's profiler records of a training."""
    plain = path.with_suffix(".plain")
    profiled(plain, training(2), record_shapes=True)
    path.write_bytes(gzip.compress(plain.read_bytes(), 1))
    plain.unlink()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A session in which two ranks were profiled."""
    folder = tmp_path_factory.mktemp("out") / "played"
    made = Served(Played(folder, onset=60))
    made.play(14)
    run = made.pages.newest.id
    stored(folder, "20260101T000000", dict.fromkeys((1, 5), recorded), [], run=run, shapes=True)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quiet(browser: webdriver.Chrome) -> Iterator[None]:
    """The console says nothing bad."""
    browser.get_log("browser")
    yield
    assert [one["message"] for one in browser.get_log("browser") if one["level"] == "SEVERE"] == []


def shows_soon(browser: webdriver.Chrome, served: Served, id: str, what: str) -> None:
    """
    Wait until an element shows a text that depends on files which the aggregator writes in the background,
    and poll until then, as a server does each second.
    """

    def seen() -> bool:
        served.poll()
        return what in text(browser, id)

    until(browser, seen)


def test_profile_is_opened_sorted_compared_and_removed(browser, shown):
    browser.get(shown.url + "/profiles")
    press(browser, By.CSS_SELECTOR, "#profile-list a[href*='/profile/2026']")
    until(browser, lambda: "aten::addmm" in text(browser, "profile-operations"))
    assert "spends" in text(browser, "profile-compared")
    press(browser, By.LINK_TEXT, "calls")
    first = until(
        browser, lambda: "↓" in text(browser, "profile-operations") and browser.execute_script(NAMES)
    )
    assert "aten::addmm" not in first[:4]
    browser.find_element(By.ID, "find").send_keys("addmm")
    until(browser, lambda: "q=addmm" in browser.current_url)
    until(browser, lambda: all("addmm" in name.lower() for name in browser.execute_script(NAMES)))
    before = browser.current_url
    press(browser, By.LINK_TEXT, "All operations as CSV")
    assert browser.current_url == before  # a file, no page
    press(browser, By.CSS_SELECTOR, "#profile-traces summary")
    press(browser, By.CSS_SELECTOR, "#profile-traces button")
    shows_soon(browser, shown, "profile-list", "None yet")
    assert profiles.names_of(shown.played.folder) == []


def test_form_asks_for_a_profile_and_shows_how_far_it_is(browser, shown):
    browser.get(shown.url + "/profiles")
    ranks = until(browser, lambda: browser.find_element(By.ID, "profile-ranks"))
    ranks.clear()
    ranks.send_keys("1,")
    press(browser, By.CSS_SELECTOR, "#profile-form button")
    assert not browser.execute_script("return arguments[0].validity.valid", ranks)  # not sent
    ranks.send_keys("5")
    press(browser, By.ID, "profile-shapes")
    press(browser, By.CSS_SELECTOR, "#profile-form button")
    until(browser, lambda: "Requested" in text(browser, "profile-now"))
    shown.play(1)
    shows_soon(browser, shown, "profile-now", "ranks 1 and 5: waiting for step")
    now = profiles.under_way(shown.played.folder)
    assert now is not None and now.shapes and now.requests[0] in browser.current_url


def test_pages_fit_a_phone_and_are_hit_with_a_finger(browser, shown):
    stored(shown.played.folder, "20260102T000000", {1: recorded}, [], run=shown.pages.newest.id)
    shown.poll()
    size = {"width": 414, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for path, id in (("/profiles", "profile-list"), ("/profile/20260102T000000", "profile-operations")):
            browser.get(shown.url + path)
            until(browser, lambda id=id: browser.find_element(By.CSS_SELECTOR, f"#{id} table"))
            assert browser.execute_script(WIDTH) <= 0 and browser.execute_script(SMALL) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
