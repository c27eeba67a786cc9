"""`report.html` as a browser opens it from a disk: readable at every width, in both themes and on paper."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from looking import FAULTS, WIDTH, as_started, screen, wear
from played import Played
from selenium import webdriver

pytestmark = pytest.mark.usefixtures("quiet")
NO_NAVIGATION = "not one current page"


def test_page_of_a_report_has_no_fault_at_any_width_and_on_paper(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    played = Played(tmp_path / "s", 16, late=5, onset=30)
    for _ in range(12):
        played.play(5)
    played.dies(5, 1, "ValueError: " + "x" * 300)
    played.end(1)
    browser.get((tmp_path / "s" / "report.html").as_uri())
    try:
        for theme, width in ((theme, width) for theme in ("light", "dark") for width in (1440, 768, 414)):
            screen(browser, width)
            wear(browser, theme)
            assert browser.execute_script(WIDTH) <= 0, width
            faults = [one for one in browser.execute_script(FAULTS) if not one.startswith(NO_NAVIGATION)]
            assert faults == [], (theme, width)
        ground = "return getComputedStyle(document.body).backgroundColor"
        assert browser.execute_script(ground) == "rgb(15, 18, 22)", "its own style is allowed, and dark"
        picture = "const one = document.images[0]; return one.complete && one.naturalHeight"
        assert browser.execute_script(picture) == 16, "the heatmap is there, a row for each rank"
        zone = {"timezoneId": "Asia/Kolkata"}
        browser.execute_cdp_cmd("Emulation.setTimezoneOverride", zone)
        browser.refresh()
        shown = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        assert browser.execute_script(shown, ".zone-name")[0] in ("Asia/Kolkata", "Asia/Calcutta")
        assert {*browser.execute_script(shown, ".zone")} == {"GMT+5:30"}
        axis = (
            "return [...document.querySelectorAll('.x time')].map((one) => [one.textContent, one.dateTime])"
        )
        for here, there in browser.execute_script(axis):
            moment = datetime.fromisoformat(there) + timedelta(hours=5.5)
            assert here == f"{moment:%H:%M:%S}"
        dates = browser.execute_script(shown, "time[data-date='named']")
        assert dates and all(
            date.startswith("2023-11-15 03:4") and date.endswith("GMT+5:30") for date in dates
        )
        screen(browser, 700)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        assert browser.execute_script(WIDTH) <= 0
    finally:
        as_started(browser)
        browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
