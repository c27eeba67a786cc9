"""
What takes long with the traces of a profile, in a process of its own with low priority: the server answers
meanwhile, and its memory stays as it is.

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
"""How long a job waits for the previous one, in s; jobs run one at a time."""
_ONE = threading.Lock()


class JobError(RuntimeError):
    """A job with traces failed; the message is a sentence for a person."""


def run(job: Job, folder: Path, out: Path, wait_s: float = WAIT_S) -> None:
    """
    Have a job done with the profile in `folder`, which writes `out`, and wait for it.

    Raises:
        JobError: it failed, or another was not over in time.
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
