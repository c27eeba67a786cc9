"""
`traceml-ray top` on a large job: `python benchmarks/terminal.py [--ranks 1024]`.

A session is played into a real aggregator, five steps a second, one rank late. Reported by window and pane:
CPU time of a redraw once a second (poll, panel, output; the aggregator's answers separately), bytes sent, and
bytes that `rich.live` would send for the same panel.
"""

from __future__ import annotations

import argparse
import gc
import io
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from figures import answering, machine, publish
from played import Played
from rich.color import ColorSystem
from rich.console import Console, Group
from rich.live import Live

from traceml_ray.terminal.panel import panel
from traceml_ray.terminal.screen import Screen
from traceml_ray.terminal.snapshot import Choice
from traceml_ray.terminal.top import Feed
from traceml_ray.views.session_poll import SessionPoll

SHOWN = [((80, 24), "overview"), ((120, 40), "overview"), ((200, 60), "overview"), ((200, 60), "ranks")]


def main() -> None:
    """Play, measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024, help="number of ranks (default: 1024)")
    parser.add_argument("--ticks", type=int, default=30, help="number of measured redraws (default: 30)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        n = arguments.ranks
        played = Played(Path(folder) / "bench", n, per_node=min(8, n), late=n - 1, onset=100, gpus=8)
        for _ in range(40):
            played.play(5)
        print(f"{machine()}\n{n} ranks, 5 steps/s, a redraw a second, medians of {arguments.ticks}")
        print("\n| window | pane | CPU of a redraw | aggregator | first frame | p50 | max | rich.live |")
        print("|---|---|---|---|---|---|---|---|")
        gc.collect()
        gc.freeze()
        rows = []
        for size, pane in SHOWN:
            line = measure(played, size, Choice(pane), arguments.ticks)
            print(line)
            rows.append([cell.strip() for cell in line.strip("| ").split("|")][:3])
    publish("terminal", (f"window, {n:,} ranks", "pane", "CPU of a redraw"), rows)


def measure(played: Played, size: tuple[int, int], choice: Choice, ticks: int) -> str:
    """Return a row of the table."""
    spent = answering(played.source)
    sent: list[int] = []
    screen = Screen(lambda text: sent.append(len(text.encode())), ColorSystem.EIGHT_BIT)
    feed = Feed(SessionPoll(played.source, clock=played.clock, timer=played.clock.timer))
    feed.choice = choice
    terminal_ms, asked = [], []
    for _ in range(ticks + 1):
        played.play(5)
        spent[0], used = 0.0, time.process_time()
        screen.draw(panel(feed.renew(), choice, *size))
        terminal_ms.append(1e3 * (time.process_time() - used - spent[0]))
        asked.append(1e3 * spent[0])
    del played.source.reply  # remove the replacement
    assert feed.newest is not None
    live = _of_live(feed, choice, size)
    cpu, part = np.median(terminal_ms[1:]), np.median(asked[1:])
    width, height = size
    bytes_ = f"{sent[0]:,} B | {np.median(sent[1:]):,.0f} B | {max(sent[1:]):,} B | {live:,} B"
    return f"| {width}×{height} | {choice.pane} | {cpu:.1f} ms, {cpu / 10:.1f} % | {part:.1f} ms | {bytes_} |"


def _of_live(feed: Feed, choice: Choice, size: tuple[int, int]) -> int:
    """Return the number of bytes that `rich.live` sends for one more frame."""
    width, height = size
    file = io.StringIO()
    console = Console(file=file, width=width, height=height + 1, color_system="256", force_terminal=True)
    assert feed.newest is not None
    lines = Group(*panel(feed.newest, choice, width, height))
    with Live(lines, console=console, auto_refresh=False) as live:
        live.refresh()
        before = len(file.getvalue().encode())
        live.refresh()
        return len(file.getvalue().encode()) - before


if __name__ == "__main__":
    main()
