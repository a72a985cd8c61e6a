"""The manifest's file: JSON under a checksum, written in pieces and read with every field checked.

The checksum is the CRC-32 of the file without it, its keys sorted and no spaces between: it does not depend on how the
file is laid out.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ray_ulysses.checkpoint.intervals import CoverError, Interval, check_cover
from ray_ulysses.checkpoint.json_fields import LIMIT, FieldError, Fields, is_text, is_whole, shown
from ray_ulysses.checkpoint.shards import ShardEntry, place_intervals
from ray_ulysses.checkpoint.state import StateDescription, TensorSpec

_CHECKSUM = "crc32"
_INTERVAL_FIELDS = ["key", "start", "stop"]
_ROWS_A_PIECE = 1000
_BEGINNING = re.compile(rb'\{"crc32":(\d{1,10}),')
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def encode(head: Mapping[str, Any], shards: Sequence[ShardEntry]) -> bytes:
    """Return the file.

    It is made in pieces: one call for all of it would hold the interpreter's lock, and with it the training loop in
    another thread, for seconds in a large world.

    Args:
        head: All but the shards, as JSON gave it back.
        shards: The shards.
    """
    pieces = [piece.encode() for piece in _members({**head, "shards": map(_shard_to_json, shards)})]
    crc32 = zlib.crc32(b"{")
    for piece in pieces:
        crc32 = zlib.crc32(piece, crc32)
    crc32 = zlib.crc32(b"}", crc32)
    return b"".join([f'{{"{_CHECKSUM}":{crc32},'.encode(), *pieces, b"}\n"])


def has_checksum(content: bytes, values: dict[str, Any]) -> bool:
    """Whether a file is what was written; takes the checksum out of its values.

    Args:
        content: The file.
        values: What JSON says that it holds.
    """
    expected = values.pop(_CHECKSUM, None)
    beginning = _BEGINNING.match(content)
    if beginning and expected == int(beginning[1]) and content.endswith(b"}\n"):
        # As `encode` leaves it, the text is what the checksum is of; it need not be made again.
        found = zlib.crc32(memoryview(content)[beginning.end() : -1], zlib.crc32(b"{"))
        if found == expected:
            return True
    return bool(expected == zlib.crc32(_text(values).encode()))


def state_to_json(state: StateDescription) -> dict[str, Any]:
    """Return what the manifest says about the state."""
    return {
        "tensors": {key: {"shape": list(spec.shape), "dtype": spec.dtype} for key, spec in state.tensors.items()},
        "tied": dict(state.tied),
        "optimizer": {
            "step": state.optimizer_step,
            "groups": [dict(group) for group in state.groups],
            "group_of": dict(state.group_of),
        },
        "counters": dict(state.counters),
    }


def state_from_json(fields: Fields) -> StateDescription:
    """Return the state that a manifest describes.

    Raises:
        FieldError: A field is missing or wrong.
    """
    tensors = {key: _tensor_from_json(spec) for key, spec in fields.object("tensors").members().items()}
    optimizer = fields.object("optimizer")
    groups = optimizer.objects("groups")
    for group in groups:
        group.check_depth()
    most = len(groups) if groups else LIMIT
    kind = f"one of the {len(groups)} groups" if groups else "a whole number from 0 on"
    group_of = optimizer.mapping("group_of", lambda number: is_whole(number, below=most), kind)
    homeless = [key for key in tensors if groups and key.startswith("fp32/") and key.split("/", 1)[1] not in group_of]
    if homeless:
        raise FieldError(f"{optimizer.at('group_of')} has no group for {shown(homeless[0].split('/', 1)[1])}")
    return StateDescription(
        tensors=tensors,
        tied=fields.mapping("tied", is_text, "a text"),
        optimizer_step=optimizer.whole("step"),
        groups=tuple(group.values for group in groups),
        group_of=group_of,
        counters=fields.mapping("counters", is_whole, "a whole number from 0 on"),
    )


def shards_from_json(
    fields: Fields, *, folder: str, world_size: int, tensors: Mapping[str, TensorSpec]
) -> tuple[ShardEntry, ...]:
    """Return the shards that a manifest names.

    Args:
        fields: The manifest's.
        folder: Where its attempt keeps its shards, relative to the checkpoint's folder.
        world_size: Ranks that wrote it; each has written one.
        tensors: The tensors of its state.

    Raises:
        FieldError: A field is missing or wrong.
    """
    # A large world has hundreds of thousands of intervals: what they need of a tensor is looked up once.
    sizes = {key: (spec.num_elements, spec.item_bytes) for key, spec in tensors.items()}
    shards = tuple(_shard_from_json(shard, folder, sizes) for shard in fields.objects("shards"))
    files: set[str] = set()
    for number, shard in enumerate(shards):
        if shard.file in files:
            raise FieldError(f"shards[{number}].file is {shown(shard.file)}, which another one has already")
        files.add(shard.file)
    # What holds nothing needs no file.
    if len(shards) != world_size and (tensors or shards):
        lost = _lost(tensors, shards)
        raise FieldError(f"shards are {len(shards)}, but each of {world_size} ranks has written one{lost}")
    return shards


def _lost(tensors: Mapping[str, TensorSpec], shards: Sequence[ShardEntry]) -> str:
    """Return in words what is missing, if it is known."""
    try:
        held = [stored.interval for shard in shards for stored in shard.intervals]
        check_cover({key: spec.num_elements for key, spec in tensors.items()}, held)
    except CoverError as error:
        return f" ({error})"
    return ""


def _tensor_from_json(fields: Fields) -> TensorSpec:
    shape = fields.items("shape")
    if not all(map(is_whole, shape)):
        raise fields.wrong("shape", "not a list of sizes")
    spec = TensorSpec(shape=tuple(shape), dtype=fields.text("dtype"))
    try:
        num_bytes = spec.num_elements * spec.item_bytes
    except ValueError as error:
        raise FieldError(f"{fields.at('dtype')}: {error}") from error
    if num_bytes >= LIMIT:
        raise fields.wrong("shape", "more than any file can hold")
    return spec


def _shard_to_json(shard: ShardEntry) -> dict[str, Any]:
    # Rows instead of objects: a large world has hundreds of thousands of them. Where each lies follows from the sizes.
    rows = [[stored.interval.key, stored.interval.start, stored.interval.stop] for stored in shard.intervals]
    return {
        "file": shard.file,
        "bytes": shard.num_bytes,
        "header_bytes": shard.header_bytes,
        "header_xxh3": shard.header_sum,
        "block_sums_xxh3": shard.sums_sum,
        "interval_fields": _INTERVAL_FIELDS,
        "intervals": rows,
    }


def _shard_from_json(fields: Fields, folder: str, sizes: Mapping[str, tuple[int, int]]) -> ShardEntry:
    if fields.items("interval_fields") != _INTERVAL_FIELDS:
        raise fields.wrong("interval_fields", f"not {_INTERVAL_FIELDS}")
    # Eight bytes are the header's own length.
    header_bytes = fields.whole("header_bytes", least=9)
    intervals = place_intervals(_intervals(fields, sizes), header_bytes)
    entry = ShardEntry(
        file=_file(fields, folder),
        num_bytes=fields.whole("bytes"),
        header_bytes=header_bytes,
        header_sum=fields.whole("header_xxh3", below=2**64),
        sums_sum=fields.whole("block_sums_xxh3", below=2**64),
        intervals=intervals,
    )
    data_end = intervals[-1].offset + intervals[-1].num_bytes if intervals else header_bytes
    if entry.sums_offset != data_end:
        whole = entry.num_bytes - entry.sums_offset + data_end
        raise fields.wrong("bytes", f"but its header, intervals and checksums come to {whole}")
    return entry


def _file(fields: Fields, folder: str) -> str:
    """Return a shard's file, which lies where the manifest's own attempt has put it."""
    file = fields.text("file")
    where, _, name = file.rpartition("/")
    if where == folder and _FILE_NAME.fullmatch(name):
        return file
    if file.startswith("/") or ".." in file.split("/"):
        raise fields.wrong("file", "which lies outside the checkpoint")
    raise fields.wrong("file", f"which is no file in {folder}, where the manifest's own attempt writes")


def _intervals(fields: Fields, sizes: Mapping[str, tuple[int, int]]) -> list[tuple[Interval, int]]:
    """Return what a shard holds, and how many bytes each takes: each inside its tensor, no tensor twice."""
    # In line and not by `Fields`: this runs for every row, of which a large world has hundreds of thousands.
    found, seen = [], set()
    for number, row in enumerate(fields.items("intervals")):
        why = None
        if type(row) is not list or len(row) != 3:
            why = f"not {_INTERVAL_FIELDS}"
        else:
            key, start, stop = row
            if type(key) is not str or key not in sizes:
                why = "which is of no tensor of the state"
            elif type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= sizes[key][0]:
                why = f"not an interval of its {sizes[key][0]} elements"
            elif key in seen:
                why = "whose tensor the shard holds already"
            else:
                seen.add(key)
                found.append((Interval(key, start, stop), (stop - start) * sizes[key][1]))
        if why is not None:
            raise FieldError(f"{fields.at('intervals')}[{number}] is {shown(row)}, {why}")
    return found


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _members(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield an object's text without its braces, as `_text` has it."""
    for number, name in enumerate(sorted(values)):
        yield f"{',' if number else ''}{_text(name)}:"
        yield from _pieces(values[name])


def _pieces(value: Any) -> Iterator[str]:
    """Yield a value's text in pieces that are made quickly, as `_text` has it."""
    if isinstance(value, dict):
        yield "{"
        yield from _members(value)
        yield "}"
    elif isinstance(value, Iterator):
        yield "["
        for number, item in enumerate(value):
            yield "," if number else ""
            yield from _pieces(item)
        yield "]"
    elif isinstance(value, list):
        yield "["
        for start in range(0, len(value), _ROWS_A_PIECE):
            yield f"{',' if start else ''}{_text(value[start : start + _ROWS_A_PIECE])[1:-1]}"
        yield "]"
    else:
        yield _text(value)
