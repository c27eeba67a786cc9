"""
Runs slow work on the traces of a profile in a separate process with low priority. Meanwhile the server
answers, and its memory does not grow.

`python -m traceml_ray.dash_app.trace_job JOB PROFILE OUT` writes a file. A failure is one line on stderr.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from traceml_ray import text
from traceml_ray.store.profiles import StoredProfile, read_profile
from traceml_ray.text import show
from traceml_ray.traces.breakdown import breakdown, encode
from traceml_ray.traces.chrome import TraceError
from traceml_ray.traces.key_averages import key_averages, to_csv
from traceml_ray.traces.merged_trace import merge
from traceml_ray.traces.sources import sources_of_profile

Job = Literal["breakdown", "trace", "table"]
MOST_S = 600.0
"""Time limit of a job, in s."""
WAIT_S = 60.0
"""Time for which a job waits for the previous one, in s. Jobs run one at a time."""
_ONE = threading.Lock()


class JobError(RuntimeError):
    """A job on traces failed. The message is a sentence for people."""


def run(job: Job, folder: Path, out: Path, wait_s: float = WAIT_S) -> None:
    """
    Run a job on the profile in `folder` and wait for it. It writes `out`.

    Raises:
        JobError: the job failed, or the previous job did not end in time.
    """
    if not _ONE.acquire(timeout=wait_s):
        raise JobError("another profile is being read; try again when that is done")
    try:
        command = [sys.executable, "-m", "traceml_ray.dash_app.trace_job", job, str(folder), str(out)]
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=MOST_S,
            env={**os.environ, **threads},
        )
    except subprocess.TimeoutExpired:
        raise JobError(f"reading its traces took longer than {text.duration(MOST_S)}") from None
    except OSError as error:
        raise JobError(f"no process could be started: {error}") from None
    finally:
        _ONE.release()
    if done.returncode:
        last_line = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise JobError(text.one_line("".join(last_line)) or f"its process ended with {done.returncode}")


def _breakdown(stored: StoredProfile, out: Path) -> None:
    out.write_bytes(encode(breakdown(sources_of_profile(stored), stored.profile.shapes)))


def _trace(stored: StoredProfile, out: Path) -> None:
    merge(sources_of_profile(stored), out, stored.profile)


def _table(stored: StoredProfile, out: Path) -> None:
    out.write_bytes(to_csv(key_averages(sources_of_profile(stored), stored.profile.shapes)))


_JOBS: dict[str, Callable[[StoredProfile, Path], None]] = {
    "breakdown": _breakdown,
    "trace": _trace,
    "table": _table,
}


def main(arguments: Sequence[str]) -> int:
    """Do the job that the arguments name: job, folder of the profile, file to write. Return the exit code."""
    os.nice(10)
    job, folder, out = arguments
    try:
        _JOBS[job](StoredProfile(Path(folder), read_profile(Path(folder))), Path(out))
    except (TraceError, ValueError, OSError, MemoryError) as error:
        show(str(error) or type(error).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
