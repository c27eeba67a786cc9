"""What a relay reads from files that the rank processes of its node write: one reader for each kind."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from traceml_ray.wire.codec import Part


class RankFileReader(Protocol):
    """
    Reads one kind of files, in a thread of its own after `start`. Any thread may call its methods; none of
    them waits for a file, except `read_once_more`.
    """

    errors: Counter[str]

    def start(self) -> None:
        """Read from now on."""

    def follow(self, process_id: str, pid: int) -> None:
        """Read the files of a rank process from now on."""

    def ended(self, process_id: str) -> None:
        """Read the files of a rank process once more because the process has ended."""

    def poll_soon(self) -> None:
        """Read soon. Does not wait."""

    def read_once_more(self, timeout_s: float) -> None:
        """Read all files once more now. Wait at most `timeout_s` seconds for the read."""

    def close(self) -> None:
        """Stop reading."""

    @property
    def waiting(self) -> bool:
        """Whether there are records that have not been drained yet."""

    def drain(self) -> Mapping[str, Sequence[Part]]:
        """Return new records by rank process. If there are many, the rest is returned by the next call."""


class PollThread:
    """
    Polls files in a thread of its own, so that a file system that hangs delays nothing else. Any thread may
    call its methods.

    Args:
        name: name of the thread.
        poll: reads what is new. An exception is counted.
        release: closes the files. It is called after the last poll.
        errors: counts of exceptions.
        what: what `errors` calls the files.
        interval: seconds between two polls.
    """

    def __init__(
        self,
        name: str,
        poll: Callable[[], object],
        release: Callable[[], object],
        errors: Counter[str],
        what: str,
        interval: float,
    ) -> None:
        self.thread: threading.Thread | None = None
        """None until `start`."""
        self._name, self._poll, self._release = name, poll, release
        self._errors, self._what, self._interval = errors, what, interval
        self._wake, self._polled = threading.Event(), threading.Event()
        self._closed = False

    def start(self) -> None:
        """Poll from now on. A second call, or one after `close`, does nothing."""
        if self.thread is None and not self._closed:
            self.thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self.thread.start()

    def poll_soon(self) -> None:
        """Poll before the interval is over. Does not wait."""
        self._wake.set()

    def poll_once_more(self, timeout_s: float) -> None:
        """Poll now. Wait at most `timeout_s` seconds for it."""
        if self.thread is None:
            self._poll()
            return
        self._polled.clear()
        self._wake.set()
        self._polled.wait(timeout_s)

    def close(self) -> None:
        """Stop polling, and release the files."""
        self._closed = True
        self._wake.set()
        if self.thread is None:
            self._release()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._poll()
            except Exception as error:
                self._errors[f"{self._what}: {type(error).__name__}"] += 1
            self._polled.set()
            self._wake.wait(self._interval)
            self._wake.clear()
        self._release()


class RankFiles:
    """All readers of a relay."""

    def __init__(self, readers: Sequence[RankFileReader]) -> None:
        self._readers = readers

    @property
    def errors(self) -> list[Counter[str]]:
        """Counts of what cannot be read."""
        return [reader.errors for reader in self._readers]

    @property
    def waiting(self) -> bool:
        """Whether a reader has records that have not been drained yet."""
        return any(reader.waiting for reader in self._readers)

    def start(self) -> None:
        """Start all readers."""
        for reader in self._readers:
            reader.start()

    def follow(self, process_id: str, pid: int) -> None:
        """Read the files of a rank process from now on."""
        for reader in self._readers:
            reader.follow(process_id, pid)

    def ended(self, process_id: str) -> None:
        """Read the files of a rank process once more because the process has ended."""
        for reader in self._readers:
            reader.ended(process_id)

    def poll_soon(self) -> None:
        """Read soon. Does not wait."""
        for reader in self._readers:
            reader.poll_soon()

    def read_once_more(self, timeout_s: float) -> None:
        """Read all files once more now. Each reader is waited for at most `timeout_s` seconds."""
        for reader in self._readers:
            reader.read_once_more(timeout_s)

    def close(self) -> None:
        """Stop reading."""
        for reader in self._readers:
            reader.close()

    def drain(self) -> dict[str, list[Part]]:
        """Return new records by rank process."""
        records: dict[str, list[Part]] = {}
        for process_id, several in itertools.chain.from_iterable(
            reader.drain().items() for reader in self._readers
        ):
            records.setdefault(process_id, []).extend(several)
        return records
