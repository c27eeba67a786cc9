"""
Take the pictures of the web app, of `top` and of report.html: python docs/screenshots.py OUT

A session of 16 ranks on two nodes is played into an aggregator: after a while, rank 13 waits for its data.
Chromium and chromedriver have to be installed.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from looking import Served, chromium  # noqa: E402
from picture import save  # noqa: E402
from played import Played  # noqa: E402
from rich.text import Text  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from traceml_ray.signals.nodes.records import NodeSample  # noqa: E402
from traceml_ray.terminal import snapshot  # noqa: E402
from traceml_ray.terminal.panel import panel  # noqa: E402
from traceml_ray.views.session_poll import SessionPoll  # noqa: E402

PAGES = {"overview": "/", "node": "/node/host-1", "rank": "/rank/13"}
WIDTH, HEIGHT = 1440, 900
WINDOW = 100, 31
"""Cells and lines of the terminal."""
SECONDS, RATE = 90, 28


class Lively(Played):
    """Machines that are not all alike, and not the same each second."""

    def _sample(self, node: int) -> NodeSample:
        sample, t = super()._sample(node), self._seconds
        gpus = [
            msgspec.structs.replace(
                gpu,
                util_pct=_about(91 - 9 * (gpu.index == 5 and node == 1), 3, t + 7 * gpu.index),
                power_w=_about(590 + 8 * gpu.index, 30, t + 5 * gpu.index),
                temperature_c=_about(58 + gpu.index, 1.5, t / 4 + gpu.index),
                sm_mhz=_about(1905 - 5 * gpu.index, 20, t + 3 * gpu.index),
                throttle=["sw_power_cap"] if gpu.index == 3 else [],
            )
            for gpu in sample.gpus or ()
        ]
        read = int((60 + 90 * node) * t + 40 * math.sin(t / 5)) << 20
        return msgspec.structs.replace(
            sample,
            gpus=gpus,
            cpu_pct=_about(38 + 9 * node, 5, t),
            disk_read_bytes=read,
            net_rx_bytes=int(300 * t + 90 * math.sin(t / 7)) << 20,
            net_tx_bytes=int(290 * t + 80 * math.sin(t / 6)) << 20,
        )


def _about(middle: float, far: float, t: float) -> float:
    return round(middle + far * (math.sin(t / 6) + 0.4 * math.sin(1.7 * t)) / 1.4, 1)


def draw_top(played: Played, out: Path) -> None:
    """Draw the panel of `traceml-ray top`."""
    poll = SessionPoll(played.source, clock=played.clock)
    poll.poll()
    shown = poll.make(lambda: snapshot.take_snapshot(poll, poll.newest, snapshot.Choice()))[1]
    lines = panel(shown, snapshot.Choice(), *WINDOW)
    save(Text("\n").join(lines), out, "traceml-ray top", WINDOW[0])


def take(out: Path) -> None:
    """Write one PNG of each page into `out`."""
    with tempfile.TemporaryDirectory() as folder:
        played = Lively(
            Path(folder) / "gpt-pretrain",
            16,
            per_node=8,
            gpus=8,
            late=13,
            onset=SECONDS * RATE - 240,
            jitter_ms=0.8,
        )
        served = Served(played)
        for _ in range(SECONDS):
            played.play(RATE)
        served.pages.poll()
        browser = chromium(Path(folder) / "profile")
        try:
            size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            draw_top(played, out / "top.svg")
            media = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            for page, path in PAGES.items():
                browser.get(served.url + path)
                WebDriverWait(browser, 20).until(lambda seen: seen.find_elements(By.CSS_SELECTOR, ".xtick"))
                browser.execute_async_script("setTimeout(arguments[0], 1500)")
                browser.save_screenshot(str(out / f"{page}.png"))
            played.end()
            browser.get((played.folder / "report.html").as_uri())
            browser.save_screenshot(str(out / "report-page.png"))
        finally:
            browser.quit()
            served.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]))
