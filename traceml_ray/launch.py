"""`python -m traceml_ray.launch`: torchrun with a monitor. Everything is in `launchers.torchrun`."""

import atexit
import sys

from traceml_ray.text import exit_now


def run() -> int:
    """
    Launch, as `launchers.torchrun.main`.

    When a signal ends the job, torch leaves its heartbeat thread running. That thread may be in C++ code when
    Python exits, which would abort this process: exit code -6 instead of 1.
    """
    codes: list[int] = []
    atexit.register(lambda: exit_now(codes[0]) if codes else None)  # before any other: so it is called last
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from traceml_ray.launchers.torchrun import main

    try:
        return main()
    except SignalException:
        codes.append(1)
        raise


if __name__ == "__main__":
    sys.exit(run())
