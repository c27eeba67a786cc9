"""The launcher's helper process, as far as it needs no Ray."""

from __future__ import annotations

import subprocess
import sys

TWO_ANSWERS = """
import sys, threading, time
from traceml_ray.launchers import helper

class Slow:  # the second answer is ready before the first has been flushed
    def write(self, text):
        sys.stdout.write(text)
        other.start()
        other.join(0.3)
    def flush(self):
        sys.stdout.flush()

late = sys.stdout, helper.HelperReply(False, "late")
other = threading.Thread(target=helper._answer, args=late, daemon=True)
helper._answer(Slow(), helper.HelperReply(True))
"""


def test_helper_prints_one_reply_when_the_deadline_meets_the_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_ANSWERS], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ['{"ok":true,"detail":""}']), done.stderr
