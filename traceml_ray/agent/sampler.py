"""One cheap look at this process, from the agent's thread."""

from __future__ import annotations

import time
from typing import Any

from traceml_ray.wire.messages import ProcessSample


class ProcessSampler:
    """CPU, memory, threads and I/O of this process; what cannot be read is `None`."""

    def __init__(self) -> None:
        import psutil

        self._process: Any = psutil.Process()
        self._process.cpu_percent(None)  # the first call only sets the starting point

    def sample(self) -> ProcessSample:
        """Return one sample; about 0.2 ms."""
        read = written = None
        with self._process.oneshot():
            cpu = self._process.cpu_percent(None)
            rss = self._process.memory_info().rss
            threads = self._process.num_threads()
            try:
                counters = self._process.io_counters()
                read, written = counters.read_bytes, counters.write_bytes
            except Exception:  # not readable in some containers: the value is then null, which says so
                pass
        return ProcessSample(time.time_ns(), cpu, rss, threads, read, written)
