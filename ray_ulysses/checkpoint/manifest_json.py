"""The manifest's file: JSON under a checksum, written in pieces and read with every field checked.

The checksum is the CRC-32 of the file without it, its keys sorted and no spaces between: it does not depend on how the
file is laid out.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from ray_ulysses.checkpoint.intervals import CoverError, Interval, check_cover
from ray_ulysses.checkpoint.shards import ShardEntry, place_intervals
from ray_ulysses.checkpoint.state import StateDescription, TensorSpec
from ray_ulysses.validation import ContentError, Free, Text, Whole, adapter, checked, shown_text, shown_value

_CHECKSUM = "crc32"
_INTERVAL_FIELDS = ["key", "start", "stop"]
_ROWS_A_PIECE = 500
_MOST_IN_A_MEMBER = 100
_NESTED = (dict, list, Iterator)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_BEGINNING = re.compile(rb'\{"crc32":(\d{1,10}),')
_Sum = Annotated[int, Field(strict=True, ge=0, lt=2**64)]
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Optimizer:
    step: Whole
    groups: tuple[Free, ...]
    group_of: dict[str, Whole]


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    tensors: dict[str, TensorSpec]
    tied: dict[str, Text]
    optimizer: _Optimizer
    counters: dict[str, Whole]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    file: str
    bytes: Whole
    # Eight bytes are the header's own length.
    header_bytes: Annotated[int, Field(strict=True, ge=9, lt=2**63)]
    header_xxh3: _Sum
    block_sums_xxh3: _Sum
    interval_fields: tuple[Literal["key"], Literal["start"], Literal["stop"]]
    intervals: list[tuple[str, Whole, Whole]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shards:
    shards: list[_Shard]


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
    """Return whether a file is intact; removes the checksum from its values.

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


def state_from_json(values: Mapping[str, Any]) -> StateDescription:
    """Return the state that a manifest describes.

    Raises:
        ContentError: A field is missing or wrong.
    """
    state = checked(adapter(_State), values)
    for key, spec in state.tensors.items():
        _check_tensor(key, spec)
    groups, group_of = state.optimizer.groups, state.optimizer.group_of
    for name, number in group_of.items():
        if groups and number >= len(groups):
            raise ContentError(
                f"optimizer.group_of.{shown_text(name)} is {number}, not one of the {len(groups)} groups"
            )
    homeless = [key for key in state.tensors if key.startswith("fp32/") and key.split("/", 1)[1] not in group_of]
    if groups and homeless:
        raise ContentError(f"optimizer.group_of has no group for {shown_value(homeless[0].split('/', 1)[1])}")
    return StateDescription(
        tensors=state.tensors,
        tied=state.tied,
        optimizer_step=state.optimizer.step,
        groups=groups,
        group_of=group_of,
        counters=state.counters,
    )


def shards_from_json(
    values: Mapping[str, Any], *, folder: str, world_size: int, tensors: Mapping[str, TensorSpec]
) -> tuple[ShardEntry, ...]:
    """Return the shards that a manifest names.

    Args:
        values: The manifest's.
        folder: Where its attempt keeps its shards, relative to the checkpoint's folder.
        world_size: Ranks that wrote it; each has written one.
        tensors: The tensors of its state.

    Raises:
        ContentError: A field is missing or wrong.
    """
    # A large world has hundreds of thousands of intervals: what they need of a tensor is looked up once.
    sizes = {key: (spec.num_elements, spec.item_bytes) for key, spec in tensors.items()}
    found = checked(adapter(_Shards), values).shards
    shards = tuple(_entry(shard, f"shards[{number}]", folder, sizes) for number, shard in enumerate(found))
    files: set[str] = set()
    for number, shard in enumerate(shards):
        if shard.file in files:
            raise ContentError(f"shards[{number}].file is {shown_value(shard.file)}, which another one has already")
        files.add(shard.file)
    # What holds nothing needs no file.
    if len(shards) != world_size and (tensors or shards):
        lost = _lost(tensors, shards)
        raise ContentError(f"shards are {len(shards)}, but each of {world_size} ranks has written one{lost}")
    return shards


def _lost(tensors: Mapping[str, TensorSpec], shards: Sequence[ShardEntry]) -> str:
    """Return in words what is missing, if it is known."""
    try:
        held = [stored.interval for shard in shards for stored in shard.intervals]
        check_cover({key: spec.num_elements for key, spec in tensors.items()}, held)
    except CoverError as error:
        return f" ({error})"
    return ""


def _check_tensor(key: str, spec: TensorSpec) -> None:
    try:
        num_bytes = spec.num_elements * spec.item_bytes
    except ValueError as error:
        raise ContentError(f"tensors.{shown_text(key)}.dtype: {error}") from error
    if num_bytes >= 2**63:
        raise ContentError(f"tensors.{shown_text(key)}.shape is {list(spec.shape)}, more than any file can hold")


def _shard_to_json(shard: ShardEntry) -> dict[str, Any]:
    # Rows instead of objects: a large world has hundreds of thousands of them. Their offsets follow from the sizes.
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


def _entry(shard: _Shard, place: str, folder: str, sizes: Mapping[str, tuple[int, int]]) -> ShardEntry:
    """Return a shard whose file, intervals and size fit together."""
    where, _, name = shard.file.rpartition("/")
    if where != folder or not _FILE_NAME.fullmatch(name):
        is_out = shard.file.startswith("/") or ".." in shard.file.split("/")
        why = (
            "is outside the checkpoint"
            if is_out
            else f"is no file in {folder}, where the manifest's own attempt writes"
        )
        raise ContentError(f"{place}.file is {shown_value(shard.file)}, which {why}")
    intervals = place_intervals(_intervals(shard, place, sizes), shard.header_bytes)
    entry = ShardEntry(
        file=shard.file,
        num_bytes=shard.bytes,
        header_bytes=shard.header_bytes,
        header_sum=shard.header_xxh3,
        sums_sum=shard.block_sums_xxh3,
        intervals=intervals,
    )
    data_end = intervals[-1].offset + intervals[-1].num_bytes if intervals else shard.header_bytes
    if entry.sums_offset != data_end:
        whole = entry.num_bytes - entry.sums_offset + data_end
        raise ContentError(f"{place}.bytes is {shard.bytes}, but its header, intervals and checksums come to {whole}")
    return entry


def _intervals(shard: _Shard, place: str, sizes: Mapping[str, tuple[int, int]]) -> list[tuple[Interval, int]]:
    """Return what a shard holds, and how many bytes each takes: each inside its tensor, no tensor twice."""
    found, seen = [], set()
    for number, (key, start, stop) in enumerate(shard.intervals):
        size = sizes.get(key)
        if size is None:
            why = "which is of no tensor of the state"
        elif not start <= stop <= size[0]:
            why = f"not an interval of its {size[0]} elements"
        elif key in seen:
            why = "whose tensor the shard holds already"
        else:
            seen.add(key)
            found.append((Interval(key, start, stop), (stop - start) * size[1]))
            continue
        raise ContentError(f"{place}.intervals[{number}] is {shown_value([key, start, stop])}, {why}")
    return found


def _text(value: object) -> str:
    return _ENCODER.encode(value)


def _members(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield an object's text without its braces, as `_text` has it."""
    for number, name in enumerate(sorted(values)):
        yield f"{',' if number else ''}{_text(name)}:"
        yield from _pieces(values[name])


def _pieces(value: Any) -> Iterator[str]:
    """Yield a value's text in pieces that are made quickly, as `_text` has it."""
    if isinstance(value, dict) and any(isinstance(one, _NESTED) and _is_long(one) for one in value.values()):
        yield "{"
        yield from _members(value)
        yield "}"
    elif isinstance(value, dict):
        names = sorted(value)
        yield "{"
        for start in range(0, len(names), _ROWS_A_PIECE):
            some = {name: value[name] for name in names[start : start + _ROWS_A_PIECE]}
            yield f"{',' if start else ''}{_text(some)[1:-1]}"
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


def _is_long(value: Any) -> bool:
    """Return whether a value within an object is worth pieces of its own."""
    return isinstance(value, Iterator) or len(value) > _MOST_IN_A_MEMBER
