"""Records of signals, from the session file."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from traceml_ray.signals.kind import Kind, R
from traceml_ray.store.reader import Reader
from traceml_ray.store.schema import legible


class RecordReader(Reader):
    """Reads what all rank processes, or nodes, of a session have sent of a signal."""

    def records(
        self, kind: Kind[R], since: int = 0, processes: Collection[int] | None = None
    ) -> Iterator[tuple[int, int, R]]:
        """
        Yield (cursor, process, record) of what came after cursor `since`, in order of arrival; where only
        some records are kept, those there are now, in the order of their slots. `processes`: only of these
        (numbers). Raises `SessionFileError`.
        """
        there = {row[1] for row in self._all(f"PRAGMA table_info({kind.table})")}
        fields = [name if name in there else f"NULL AS {name}" for name in kind.fields]
        query = f"SELECT id, {kind.owner}, {', '.join(fields)} FROM {kind.table} WHERE id > ?"
        if processes is not None:
            query += f" AND {kind.owner} IN ({', '.join(str(int(process)) for process in processes)})"
        kept: list[tuple[int, int, R]] = []
        with legible(self.path):
            for cursor, owner, *values in self._iterate(
                f"{query} ORDER BY id", since if kind.keep == "all" else -1
            ):
                if kind.keep == "all":
                    yield cursor, owner, kind.of_row(values)
                else:
                    kept.append((cursor, owner, kind.of_row(values)))
        yield from sorted(kept, key=lambda row: kind.slot(row[2]))

    def records_of(self, kind: Kind[R], processes: Collection[int] | None = None) -> dict[int, list[R]]:
        """Return the records of `processes` (numbers; None: all), by process. Raises `SessionFileError`."""
        records_of_process: dict[int, list[R]] = {}
        for _, process, record in self.records(kind, processes=processes):
            records_of_process.setdefault(process, []).append(record)
        return records_of_process
