"""
Reads the files in which torch's flight recorder leaves the collectives of each rank: pickle or JSON.

The files are foreign. A pickle may hold plain data only: any operation that could import or call something,
or that reserves memory without data, is refused before Python's unpickler sees the file. Versions 1
(torch 2.2) to 2.10 of the format are read; what a version lacks stays unknown.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from traceml_ray.files import open_file
from traceml_ray.identity import rank_in_name
from traceml_ray.signals.collectives.calls import CollectiveCall, ProcessGroup, RankCollectives, Sizes
from traceml_ray.text import one_line

MAX_BYTES = 256 << 20
"""Largest size of a file that is read, in bytes. A ring of 20,000 calls takes about 5 MB."""
MAX_CALLS = 200_000
"""Largest number of calls that are read from a file: the newest."""
MAX_FILES = 100_000
"""Largest number of files in a folder."""
_MAX_TENSORS, _MAX_DIMENSIONS, _MAX_CHARS, _MAX_FRAMES = 4096, 64, 300, 200
_MAX_RANKS = 1 << 20
_INT64 = 1 << 63


class DumpError(ValueError):
    """A file that is not used. The message says which, and why, in one line."""


class DumpFile(NamedTuple):
    """A file with the collectives of one rank."""

    rank: int
    path: Path

    @property
    def stem(self) -> str:
        """Name without numbers: the same for all ranks of a job."""
        name = self.path.name
        return _NUMBER.sub("", name if _RANK.search(name) else f"{self.path.parent.name}/{name}")


_NUMBER = re.compile(r"\d+", re.ASCII)
_RANK = re.compile(r"(\d{1,9})(?:\.(?:json|pkl|pickle|pt|bin|dump|txt|fr|gz))*$", re.ASCII)


def dump_files(paths: Iterable[Path]) -> list[DumpFile]:
    """
    Return the files that `paths` refer to, by rank. The rank is the number at the end of a file's name, as
    torch writes it (`nccl_trace_rank_3`); of a file without one, that of its folder (`rank_3`). Files of a
    folder that have other names, and do not begin like a dump, are left out.

    Raises DumpError if nothing is there, or if two files are of the same rank.
    """
    files: dict[int, Path] = {}
    for given in paths:
        for rank, path in _dumps_in(given):
            if rank in files and files[rank] != path:
                raise DumpError(f"{path}: rank {rank} is also in {files[rank]}; give the dumps of one job")
            files[rank] = path
    return [DumpFile(rank, files[rank]) for rank in sorted(files)]


def _dumps_in(given: Path) -> list[DumpFile]:
    """Return the dumps in a folder, or the file itself. Raises DumpError."""
    paths = [*_in(given)]
    files = [DumpFile(rank, path) for path in paths if (rank := _rank_of(path)) is not None]
    if paths == [given]:
        if not files:
            raise DumpError(f"{given}: its name does not end with the number of its rank")
        return files
    stems = {file.stem for file in files if _begins_like_a_dump(file.path)}
    return [file for file in files if file.stem in stems] if stems else files


_GZIP = b"\x1f\x8b"


def _begins_like_a_dump(path: Path) -> bool:
    try:
        with open_file(path) as file:
            return file.read(2).startswith((b"\x80", b"{", b"[", _GZIP))
    except OSError:
        return False


def ranks_of_job(files: Iterable[DumpFile], read: Collection[int]) -> int:
    """Return how many ranks a job has: from the largest rank with a name like those that were read."""
    files = [*files]
    stems = {file.stem for file in files if file.rank in read}
    return max((file.rank for file in files if file.stem in stems), default=-1) + 1


def _in(given: Path) -> Iterator[Path]:
    """Yield the files of a folder and its folders, or the file itself."""
    try:
        if not given.is_dir():
            given.stat()
            yield given
            return
        count = 0
        for folder, inside, names in os.walk(given):
            inside.sort()
            for name in sorted(names):
                if (count := count + 1) > MAX_FILES:
                    raise DumpError(f"{given}: it has more than {MAX_FILES:,} files")
                if not name.startswith("."):
                    yield Path(folder, name)
    except (OSError, ValueError) as error:
        if isinstance(error, DumpError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise DumpError(f"{given}: {reason}") from None


def _rank_of(path: Path) -> int | None:
    match = _RANK.search(path.name)
    return int(match[1]) if match else rank_in_name(path.parent.name)


def read_dumps(files: Iterable[DumpFile], refused: list[str]) -> Iterator[RankCollectives]:
    """Yield the collectives of each file, one after the other. Adds to `refused` why a file is not used."""
    for file in files:
        try:
            yield read_dump(file.path, file.rank)
        except DumpError as error:
            refused.append(str(error))


def read_dump(path: Path, rank: int) -> RankCollectives:
    """Return the collectives in a file of torch's flight recorder. Raises DumpError."""
    try:
        data, written_ns = _read(path)
        return parsed(data, rank, written_ns)
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise DumpError(f"{path}: {one_line(str(error) or type(error).__name__)[:200]}") from None


def _read(path: Path) -> tuple[bytes, int]:
    """Return the contents of a file, and when it was changed last (ns since the epoch). Raises OSError."""
    with open_file(path) as file:
        state = os.fstat(file.fileno())
        if state.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_BYTES:,} bytes", str(path))
        return _unpacked(file.read(state.st_size), path), state.st_mtime_ns


def _unpacked(data: bytes, path: Path) -> bytes:
    """Return what gzip has packed; else the data. Raises OSError."""
    if not data.startswith(_GZIP):
        return data
    packed = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        unpacked = packed.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise OSError(errno.EINVAL, f"damaged gzip: {error}", str(path)) from None
    if packed.unconsumed_tail:
        raise OSError(errno.EFBIG, f"larger than {MAX_BYTES:,} bytes", str(path))
    return unpacked


def parsed(data: bytes, rank: int, written_ns: int | None = None) -> RankCollectives:
    """
    Return the collectives of a rank from the bytes of its dump.

    Args:
        data: pickle or JSON.
        rank: the rank that wrote it.
        written_ns: when its file was changed last (ns since the epoch); None: not known.

    Raises ValueError for data that are no dump.
    """
    if not data:
        raise ValueError("the file is empty")
    content = _plain(data)
    if isinstance(content, list):  # version 1 before torch 2.3: the entries alone
        content = {"entries": content}
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError("no dump of torch's flight recorder: it has no entries")
    entries = content["entries"]
    reader = _Entries()
    calls = [call for entry in entries[-MAX_CALLS:] if (call := reader.call(entry)) is not None]
    if entries and not calls:
        raise ValueError("no dump of torch's flight recorder: its entries are no collectives")
    first = entries[0].get("record_id") if entries and isinstance(entries[0], dict) else 0
    newest = max((call.created_ns or 0 for call in calls), default=0)
    return RankCollectives(
        rank=rank,
        calls=calls,
        groups=reader.with_ranks(content.get("pg_config")),
        whole=first == 0 and len(entries) <= MAX_CALLS,
        taken_ns=_not_before(newest, _integer(content.get("taken_ns"))),
        written_ns=_not_before(newest, written_ns),
    )


def _not_before(newest_ns: int, t_ns: int | None) -> int | None:
    """Return a time of recording. None: it is not known, or before the newest call."""
    return t_ns if t_ns is not None and t_ns >= newest_ns else None


# Plain data

_FRAME = rb"\x95.{6}\x00\x00"
_VALUES = rb"[()\]}N\x88\x89\x94\x85\x86\x87tsuae]|K.|M..|J.{4}|[hq].|[jr]..[\x00-\x7f]\x00|G.{8}"
_LONGS = b"|".join(rb"\x8a" + bytes([n]) + rb".{%d}" % n for n in range(9))
_RUN = re.compile(rb"(?:%s|%s|%s)*" % (_VALUES, _LONGS, _FRAME), re.DOTALL)
"""Operations of a pickle that make plain data without text. Others import, call, or reserve memory."""


def _plain(data: bytes) -> Any:
    """Return what a pickle or JSON holds. Raises ValueError."""
    if data[:1] != b"\x80":
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"neither a pickle nor JSON: {error}") from None
    _check(data)
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"a damaged pickle: {type(error).__name__}: {error}") from None


def _check(data: bytes) -> None:
    """Raise ValueError for a pickle with anything but plain data."""
    position = 2
    while True:
        matched = _RUN.match(data, position)
        assert matched is not None
        position = matched.end()
        code = data[position : position + 1]
        if code == b".":
            return
        if code == b"X":  # text, of up to 4 GB
            length = int.from_bytes(data[position + 1 : position + 5], "little")
            position += 5 + length
        elif code == b"\x8c":  # text, of up to 255 bytes
            position += 2 + int.from_bytes(data[position + 1 : position + 2], "little")
        elif not data.endswith(b"."):
            raise ValueError("a pickle that is cut off")
        else:
            raise ValueError(f"a pickle with more than plain data (operation {code!r}); it is not loaded")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise ValueError("it names an object outside")


# Entries


class _Entries:
    """Reads the entries of one dump. Lists that several entries share are converted once."""

    def __init__(self) -> None:
        self._groups: dict[str, ProcessGroup] = {}
        self._sizes: dict[int, Sizes] = {}
        self._dtypes: dict[int, tuple[str, ...]] = {}
        self._places: dict[int, str | None] = {}
        self._names: dict[Any, str] = {}

    def call(self, entry: Any) -> CollectiveCall | None:
        """Return the call of an entry. None: it is none."""
        if not isinstance(entry, dict):
            return None
        named = entry.get("profiling_name")
        op = self._name(named) if isinstance(named, str) else ""
        if not op:
            return None
        op = op.partition(":")[2] or op
        p2p = entry.get("is_p2p") is True or op.startswith(("send ", "recv "))
        number = entry.get("p2p_seq_id" if p2p else "collective_seq_id", entry.get("seq_id"))
        group = self._group(entry)
        return CollectiveCall(
            group=group,
            seq=_integer(number) or 0,
            op=op,
            in_sizes=self._shapes(entry.get("input_sizes")),
            in_dtypes=self._types(entry.get("input_dtypes")),
            out_sizes=self._shapes(entry.get("output_sizes")),
            out_dtypes=self._types(entry.get("output_dtypes")),
            p2p=p2p,
            done=entry.get("retired") is True or entry.get("state") == "completed",
            created_ns=_integer(entry.get("time_created_ns")) or None,
            where=self._place(entry.get("frames")),
        )

    def _name(self, value: Any) -> str:
        """Return a name as `_text` does, for names that occur often."""
        if not isinstance(value, str):
            return _text(value)
        name = self._names.get(value)
        if name is None:
            name = self._names[value] = _text(value)
        return name

    def _group(self, entry: dict[str, Any]) -> str:
        """Return the name of an entry's group, and keep what is known of it."""
        pair = entry.get("process_group")
        if isinstance(pair, (tuple, list)) and len(pair) == 2:
            name, desc = self._name(pair[0]), self._name(pair[1])
        else:
            name, desc = _text(entry.get("pg_id")), ""
        timeout = _integer(entry.get("timeout_ms"))
        if name not in self._groups or (timeout and self._groups[name].timeout_s is None):
            timeout_s = timeout / 1e3 if timeout and timeout > 0 else None
            self._groups[name] = ProcessGroup(name, desc if desc != "undefined" else "", timeout_s=timeout_s)
        return name

    def _shapes(self, sizes: Any) -> Sizes:
        if not isinstance(sizes, (list, tuple)) or not sizes:
            return ()
        known = self._sizes.get(id(sizes))
        if known is None:
            shapes = sizes[:_MAX_TENSORS] if isinstance(sizes[0], (list, tuple)) else [sizes]
            known = tuple(_shape(shape) for shape in shapes if isinstance(shape, (list, tuple)))
            self._sizes[id(sizes)] = known
        return known

    def _types(self, dtypes: Any) -> tuple[str, ...]:
        if isinstance(dtypes, str):
            return (_text(dtypes),)
        if not isinstance(dtypes, (list, tuple)) or not dtypes:
            return ()
        known = self._dtypes.get(id(dtypes))
        if known is None:
            known = self._dtypes[id(dtypes)] = tuple(map(self._name, dtypes[:_MAX_TENSORS]))
        return known

    def _place(self, frames: Any) -> str | None:
        if not isinstance(frames, list) or not frames:
            return None
        if id(frames) not in self._places:
            self._places[id(frames)] = _user_place(frames)
        return self._places[id(frames)]

    def with_ranks(self, configured: Any) -> list[ProcessGroup]:
        """Return the groups, with the ranks that the dump lists for them (of NCCL)."""
        if isinstance(configured, dict):
            for key, value in list(configured.items())[:_MAX_RANKS]:
                if not isinstance(value, dict):
                    continue
                name, ranks = _text(value.get("name", key)), _ranks(value.get("ranks"))
                if ranks and name:  # of gloo there is one entry without a name, for any of its groups
                    known = self._groups.get(name)
                    desc = (known.desc if known else "") or _text(value.get("desc"))
                    timeout_s = known.timeout_s if known else None
                    self._groups[name] = ProcessGroup(name, desc, ranks, timeout_s)
        return list(self._groups.values())


def _text(value: Any) -> str:
    """Return a name as one line of bounded length; "" for anything but text and integers."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if -_INT64 <= value < _INT64 else ""
    return one_line(value[:_MAX_CHARS]) if isinstance(value, str) else ""


def _shape(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(
        size if type(size) is int and 0 <= size < _INT64 else _integer(size) or 0
        for size in shape[:_MAX_DIMENSIONS]
    )


def _integer(value: Any) -> int | None:
    """Return a number, which JSON has as text, too. None: it is none, or has more than 64 bits."""
    if type(value) is int and 0 <= value < _INT64:
        return value
    if isinstance(value, str) and len(value) < 20 and re.fullmatch(r"-?[0-9]+", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -_INT64 <= value < _INT64 else None


def _ranks(value: Any) -> tuple[int, ...] | None:
    """Return the ranks of a group: torch writes "[0, 1, 2]"."""
    if isinstance(value, str):
        if len(value) > 16 * _MAX_RANKS or not re.fullmatch(r"[\[\]\s\d,]*", value, re.ASCII):
            return None
        value = [int(digits) for digits in re.findall(r"\d{1,9}", value, re.ASCII)]
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_RANKS:
        return None
    ranks = {rank for one in value if (rank := _integer(one)) is not None and 0 <= rank < _MAX_RANKS}
    return tuple(sorted(ranks)) or None


_LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/", "/traceml_ray/")
_STANDARD = re.compile(r"/python3(?:\.\d+)?/|/ray/")


def _user_place(frames: list[Any]) -> str | None:
    """Return the innermost call of the user's code: `train (train.py:60)`. None: there is none."""
    for frame in frames[:_MAX_FRAMES]:
        if not isinstance(frame, dict):
            continue
        path, line = frame.get("filename"), _integer(frame.get("line"))
        if not isinstance(path, str) or path.startswith(("<", "??")) or not path.endswith(".py"):
            continue
        if any(part in path for part in _LIBRARIES) or _STANDARD.search(path):
            continue
        name = path.rpartition("/")[2].rpartition("\\")[2]
        return one_line(f"{_text(frame.get('name'))} ({name[:_MAX_CHARS]}:{line or 0})")
    return None
