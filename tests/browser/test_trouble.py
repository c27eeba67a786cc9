"""What the web app says when something happens to a real job: real ranks, a real launcher, Chromium."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from looking import answers, looks_right, press, shows, text, until
from selenium import webdriver
from selenium.webdriver.common.by import By

from traceml_ray.launchers.cluster import free_port

pytestmark = pytest.mark.usefixtures("quiet")

SCRIPT = """
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])


class Samples(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, at):
        time.sleep(0.02)
        if rank == 1 and (folder / "slow").exists():
            time.sleep(0.03)
        if rank == 1 and (folder / "hang").exists():
            time.sleep(600)
        if rank == 1 and (folder / "crash").exists():
            raise ValueError("sample %d is not an image" % at)
        return torch.full((4,), at % 5 / 5)


(folder / f"pid.{rank}").write_text(str(os.getpid()))
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Samples()):
    if (folder / "end").exists():
        break
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
QUICK = {
    "OMP_NUM_THREADS": "1",
    "TRACEML_INTERVAL": "0.25",
    "TRACEML_THRESHOLD_HANG_TIMEOUT_S": "2",
    "TRACEML_THRESHOLD_REPORT_TIMEOUT_S": "1.6",
}


class Job:
    """A launch of the script with a dashboard that outlives it; `do` has something happen."""

    def __init__(self, out: Path, session: str, ranks: int = 2) -> None:
        self.folder, self._port = out / f"{session}-files", free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.folder.mkdir()
        script = self.folder / "train.py"
        script.write_text(SCRIPT)
        flags = ["--nproc-per-node", str(ranks), "--out", str(out), "--session", session]
        flags += [f"--dashboard={self._port}", "--dashboard-linger=120"]
        command = [sys.executable, "-m", "traceml_ray.launch", *flags, str(script), str(self.folder)]
        with (self.folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                command, env={**os.environ, **QUICK}, stdout=output, stderr=subprocess.STDOUT
            )

    def opened(self, browser: webdriver.Chrome, path: str = "/") -> None:
        """Open a page, once it is served and some steps are done."""
        until(browser, lambda: answers(self._port))
        browser.get(self.url + path)
        until(browser, lambda: "step" in text(browser, "coverage"))

    def do(self, what: str) -> None:
        (self.folder / what).touch()

    def kill(self, rank: int) -> None:
        os.kill(int((self.folder / f"pid.{rank}").read_text()), signal.SIGKILL)

    def ended(self) -> int:
        return self.process.wait(240)


@pytest.fixture
def launch(browser: webdriver.Chrome, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def start(*what: Any) -> Job:
        started.append(Job(tmp_path, *what))
        return started[-1]

    yield start
    browser.get("about:blank")
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(240)


def headline(browser: webdriver.Chrome) -> str:
    return text(browser, "verdict-headline")


def goes_where_it_says(browser: webdriver.Chrome, job: Job, rank: int) -> None:
    """The headline's buttons: copy as text, copy the link, and open the rank."""
    kept = "document.addEventListener('copy', (event) => { window.copied = event.target.value })"
    browser.get(job.url + "/")
    until(browser, lambda: browser.find_element(By.LINK_TEXT, f"Open rank {rank}"))
    browser.execute_script(kept)
    copied: list[str] = []
    for button in ("Copy as text", "Copy link"):
        until(browser, lambda button=button: press_button(browser, button))
        copied.append(
            until(browser, lambda: browser.execute_script("const was = copied; copied = ''; return was"))
        )
    assert headline(browser).lower() in copied[0].lower() and "Why: " in copied[0] and copied[1] in copied[0]
    assert copied[1].startswith(job.url) and "session=" in copied[1]
    press(browser, By.LINK_TEXT, f"Open rank {rank}")
    shows(browser, "rank-title", f"Rank {rank} on ")
    browser.get(copied[1])
    shows(browser, "verdict-headline", f"rank {rank}")


def press_button(browser: webdriver.Chrome, name: str) -> bool:
    browser.find_element(By.XPATH, f"//button[contains(., '{name}')]").click()
    return True


@pytest.mark.long
def test_killed_rank_is_named_first_with_when_and_in_what_it_was(browser, launch):
    job = launch("killed")
    job.opened(browser)
    job.kill(1)
    shows(browser, "verdict-headline", "ank lost: rank 1")
    assert text(browser, "state-badge") != "live"
    for words in ("SIGKILL", "after step ", "Next It was killed"):
        shows(browser, "verdict-strip", words)
    looks_right(browser, job.url + "/rank/1", "Killed by SIGKILL at ", "It ended first")
    assert job.ended() != 0


@pytest.mark.long
def test_after_a_crash_of_all_the_first_cause_comes_first(browser, launch):
    job = launch("crashed", 3)
    job.opened(browser)
    job.do("crash")
    shows(browser, "verdict-headline", "ank lost: rank 1")
    shows(browser, "verdict-headline", "in data")
    shows(browser, "verdict-strip", "is not an image")
    assert job.ended() == 1
    shows(browser, "state-badge", "stored file")
    looks_right(browser, job.url + "/", "Rank lost: rank 1", "is not an image", "Read the traceback")
    looks_right(browser, job.url + "/events", "First cause", "What followed")
    looks_right(browser, job.url + "/rank/1", "ValueError", "It ended first", "__getitem__")
    looks_right(browser, job.url + "/rank/0", "It ended after rank 1, the first")
    looks_right(browser, job.url + "/ranks", "exit code")
    goes_where_it_says(browser, job, 1)


@pytest.mark.long
def test_hang_is_named_with_since_when_and_where_the_ranks_are(browser, launch):
    job = launch("hung", 3)
    job.opened(browser)
    job.do("hang")
    shows(browser, "verdict-headline", "ang: rank 1")
    shows(browser, "verdict-headline", "in data")
    looks_right(browser, job.url + "/", "ang: rank 1", "No step is completed", "Since ", "Next")
    looks_right(browser, job.url + "/rank/1", "Where the ranks were in the last hang", "in __getitem__")
    looks_right(browser, job.url + "/events", "hang: rank 1")
    goes_where_it_says(browser, job, 1)
    job.process.terminate()
    assert job.ended() != 0
    shows(browser, "state-badge", "stored file")
    looks_right(browser, job.url + "/", "ang: rank 1")


@pytest.mark.long
def test_sessions_beside_each_other_and_one_whose_file_is_deleted(browser, launch, tmp_path):
    before = launch("before")
    before.opened(browser)
    until(browser, lambda: int(text(browser, "coverage").rpartition("step ")[2]) > 60)
    before.do("end")
    assert before.ended() == 0
    job = launch("now")
    job.do("slow")
    job.opened(browser)
    shows(browser, "verdict-headline", "traggler: rank 1")
    looks_right(browser, job.url + "/", "traggler: rank 1", "Since step ", "Next")
    goes_where_it_says(browser, job, 1)
    looks_right(browser, job.url + "/sessions", "before", "now", "running", "finished")
    looks_right(browser, job.url + "/sessions?a=before&b=now", "A: before", "B: now", "median step")
    browser.get(job.url + "/rank/1?session=before")
    shows(browser, "rank-title", "Rank 1")
    for file in (tmp_path / "before").glob("session.sqlite*"):
        file.unlink()
    gone = "Session 'before' cannot be read: ", "now"
    for what in gone:
        shows(browser, "react-entry-point", what)
    looks_right(browser, job.url + "/?session=before", *gone)
    assert "traggler" not in text(browser, "react-entry-point")
