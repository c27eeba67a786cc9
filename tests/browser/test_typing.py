"""What a person types stays, however late the server's answers come, and slow answers are drawn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from looking import Served, press, shows, text, until
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quiet")]

TICKS = "window.dash_clientside.set_props('tick', { disabled: arguments[0] })"
CHARTS = "return document.querySelectorAll('main .graph:not(.spine)').length"


@pytest.fixture
def running(served: Served, browser: webdriver.Chrome) -> Iterator[Served]:
    """The session behind a server whose answers are late once `late_s` is set."""
    if not served.played.step:
        served.play(14)
    yield served
    served.late_s = 0.0
    browser.get("about:blank")


def typed(browser: webdriver.Chrome, *keys: str) -> None:
    """Press keys, wherever the focus is."""
    ActionChains(browser).send_keys(*keys).perform()


def replaced(browser: webdriver.Chrome, keys: str) -> None:
    """Press keys where the focus is, with all of the text selected."""
    chosen = ActionChains(browser).key_down(Keys.CONTROL).send_keys("a").key_up(Keys.CONTROL)
    chosen.send_keys(keys).perform()


def field(browser: webdriver.Chrome) -> tuple[str, str]:
    """Return the id of the element that has the focus, and the text of the search field."""
    which = "return [document.activeElement.id, document.getElementById('find').value]"
    id, words = browser.execute_script(which)
    return id, words


def test_page_is_drawn_although_each_answer_takes_longer_than_a_tick(browser, running):
    running.late_s = 0.6  # a tick: 0.25
    browser.get(running.url + "/ranks")
    shows(browser, "rank-table", "8 ranks")
    before = text(browser, "coverage")
    running.play(1)
    until(browser, lambda: text(browser, "coverage") != before)


def test_text_stays_where_the_answer_to_an_earlier_text_is_late(browser, running):
    browser.get(running.url + "/ranks")
    shows(browser, "rank-table", "8 ranks")
    browser.execute_script(TICKS, True)
    running.late_s = 1.0
    press(browser, By.ID, "find")
    typed(browser, "host")
    until(browser, lambda: browser.current_url.endswith("/ranks?q=host"))
    typed(browser, "-0", Keys.TAB)  # leaves the field before its text is sent
    browser.execute_script(TICKS, False)
    shows(browser, "rank-table", "4 of 8 ranks")
    assert browser.current_url.endswith("/ranks?q=host-0")
    assert field(browser) != ("find", "host-0") and field(browser)[1] == "host-0"


def test_field_keeps_focus_and_text_when_its_page_is_made_again(browser, running):
    browser.get(running.url + "/memory")
    until(browser, lambda: browser.execute_script(CHARTS))
    press(browser, By.ID, "find")
    typed(browser, "99")  # there is no such rank: the page has no chart of memory
    until(browser, lambda: not browser.execute_script(CHARTS))
    assert field(browser) == ("find", "99")
    typed(browser, Keys.ARROW_LEFT, "8")
    until(browser, lambda: browser.current_url.endswith("/memory?q=989"))
    replaced(browser, Keys.BACKSPACE)
    until(browser, lambda: browser.execute_script(CHARTS))
    assert field(browser) == ("find", "") and browser.current_url.endswith("/memory")


def test_back_and_forward_show_the_text_of_each_search(browser, running):
    browser.get(running.url + "/ranks")
    shows(browser, "rank-table", "8 ranks")
    press(browser, By.ID, "find")
    browser.execute_cdp_cmd("Input.insertText", {"text": "host-0"})  # without pauses: one search
    shows(browser, "rank-table", "4 of 8 ranks")
    browser.back()
    until(browser, lambda: not text(browser, "rank-table").endswith("4 of 8 ranks"))
    assert field(browser)[1] == ""
    browser.forward()
    shows(browser, "rank-table", "4 of 8 ranks")
    assert field(browser)[1] == "host-0"
    replaced(browser, "host-1")
    press(browser, By.LINK_TEXT, "Events")  # before the text is searched: it belongs to the other page
    shows(browser, "event-table", "straggler")
    assert field(browser)[1] == "" and browser.current_url.endswith("/events")


def test_box_keeps_what_is_typed_while_the_page_of_the_last_text_is_awaited(browser, running):
    browser.get(running.url + "/")
    shows(browser, "event-list", "rank 5")
    running.late_s = 1.0
    press(browser, By.ID, "goto")
    typed(browser, "3", Keys.ENTER, "host-0")
    until(browser, lambda: browser.current_url.endswith("/rank/3"))
    assert browser.execute_script("return document.getElementById('goto').value") == "host-0"
    typed(browser, Keys.ENTER)
    shows(browser, "node-title", "Node host-0")
