"""Windows of layers in the session file: the newest of each rank process, in a ring."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import msgspec

from traceml_ray import wire
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
        wanted, found = {*processes}, dict[int, list[wire.LayerWindow]]()
        with legible(self.path):
            query = f"SELECT process, {', '.join(_FIELDS)} FROM layer_window ORDER BY process, number"
            for process, *values in self._iterate(query):
                if process in wanted:
                    found.setdefault(process, []).append(_window(values))
        return found


def _window(values: list[Any]) -> wire.LayerWindow:
    try:
        unpacked = zlib.decompressobj().decompress(values[_AT], _MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"a window of layers that cannot be read: {error}") from None
    values[_AT] = msgspec.msgpack.decode(unpacked, type=list[wire.LayerSum])
    values[_FIELDS.index("accelerated")] = bool(values[_FIELDS.index("accelerated")])
    values[_FIELDS.index("waits")] = bool(values[_FIELDS.index("waits")])
    return msgspec.convert(values, wire.LayerWindow)
