"""Windows of layers in the session file: the newest of each rank process, in a ring."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Iterator
from typing import Any

import msgspec

from traceml_ray import wire
from traceml_ray.codec import ready
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.reader import Reader
from traceml_ray.store.schema import legible, update

WINDOWS = 16
"""Of a rank process that are kept."""
_FIELDS = wire.LayerWindow.__struct_fields__
LAYER_WINDOWS = update("layer_window", "id", ("process", *_FIELDS))
_MAX_BYTES = 1 << 20
_AT = _FIELDS.index("layers")


def to_layer_row(process: RankProcess, window: wire.LayerWindow) -> tuple[Any, ...]:
    """Return the row of a window; its layers are packed."""
    values = [*msgspec.structs.astuple(window)]
    values[_AT] = zlib.compress(msgspec.msgpack.encode(window.layers), 1)
    return process.id * WINDOWS + window.number % WINDOWS, process.id, *values


class LayerReader(Reader):
    """Reads windows of layers."""

    def layer_windows(self, processes: Iterable[int]) -> dict[int, list[wire.LayerWindow]]:
        """Return the windows of each of `processes` (ids), the oldest first. Raises `SessionFileError`."""
        found = dict[int, list[wire.LayerWindow]]()
        for process, window in self.every_layer_window({*processes}):
            found.setdefault(process, []).append(window)
        return found

    def every_layer_window(self, of: Container[int] | None = None) -> Iterator[tuple[int, wire.LayerWindow]]:
        """
        Yield the windows of the processes `of` (ids; None: of all) with the id of each, those of a process
        one after the other, the oldest first. Raises `SessionFileError`.
        """
        with legible(self.path):
            query = f"SELECT process, {', '.join(_FIELDS)} FROM layer_window ORDER BY process, number"
            for process, *values in self._iterate(query):
                if of is None or process in of:
                    yield process, _window(values)


def _window(values: list[Any]) -> wire.LayerWindow:
    try:
        unpacked = zlib.decompressobj().decompress(values[_AT], _MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"a window of layers that cannot be read: {error}") from None
    values[_AT] = msgspec.msgpack.decode(unpacked, type=ready(list[wire.LayerSum]))
    values[_FIELDS.index("accelerated")] = bool(values[_FIELDS.index("accelerated")])
    values[_FIELDS.index("waits")] = bool(values[_FIELDS.index("waits")])
    return msgspec.convert(values, ready(wire.LayerWindow))
