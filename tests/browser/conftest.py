"""One browser for all tests, and a session behind a server for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from looking import CHROMIUM, DRIVER, Served, chromium
from played import Played
from selenium import webdriver


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium and chromedriver are not installed")
    driver = chromium(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def quiet(browser: webdriver.Chrome) -> Iterator[None]:
    """The console says nothing bad, of whatever a test does: no error, nothing that the policy forbids."""
    browser.get_log("browser")
    yield
    bad = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert bad == []


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Eight ranks on two nodes; from step 60 on, rank 5 is late in `data`."""
    made = Served(Played(tmp_path_factory.mktemp("out") / "played", onset=60))
    yield made
    made.close()
