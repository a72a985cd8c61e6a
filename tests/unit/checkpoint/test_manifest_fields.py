"""Every field of a manifest is checked: the checksum says that a file is whole, and not that it makes sense."""

from __future__ import annotations

import contextlib
import copy
import math
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ulysses.checkpoint import Manifest
from ray_ulysses.checkpoint.intervals import CoverError, check_cover
from ray_ulysses.checkpoint.manifest import ManifestError, read_facts
from ray_ulysses.run_names import manifest_key, shard_file
from tests.breadth import examples
from tests.stores import MemoryStore
from tests.unit.checkpoint.manifests import NUM_LARGE, PATHS, TENSORS, changed, removed, replaced, signed, tree

STATE_FIELDS = ("tensors", "tied", "optimizer", "counters", "shards")
FIRST, SECOND = ("shards", 0), ("shards", 1)
ROW = (*FIRST, "intervals", 0)
WEIGHT, MOMENT = "fp32/layer.weight", "exp_avg/layer.weight"
HALF = NUM_LARGE // 2
WRONG: list[tuple[tuple[Any, ...], object, str]] = [
    (("step",), "6", "step is '6', but must be a whole number"),
    (("step",), -1, "step is -1, but must be at least 0"),
    (("step",), True, "step is True, but must be a whole number"),
    (("step",), 6.0, "step is 6.0, but must be a whole number"),
    (("attempt",), None, "attempt is None, but must be a whole number"),
    (("attempt",), math.nan, "attempt is nan, but must be a whole number"),
    (("attempt",), "1", "attempt is '1', but must be a whole number"),
    (("attempt",), 0, "attempt is 0, but must be at least 1"),
    (("attempt",), 2, f"shards[0].file is '{shard_file(3, 0, 2)}', which is no file in attempt-0002, where the"),
    (("world_size",), 0, "world_size is 0, but must be at least 1"),
    (("world_size",), 10**30, f"world_size is {10**30}, but must be below {2**63}"),
    (("world_size",), 3, "shards are 2, but each of 3 ranks has written one"),
    (("sp_size",), 0, "sp_size is 0, but must be at least 1"),
    (("ring_size",), None, "ring_size is None, but must be a whole number"),
    (("zero_stage",), 4, "zero_stage is 4, but must be below 4"),
    (("cursor",), None, "cursor is None, but must be a mapping"),
    (("cursor",), [["next_row", 12]], "cursor is [['next_row', 12]], but must be a mapping"),
    (("digest",), "hello", "digest is 'hello', but must be up to 16 hexadecimal digits"),
    (("digest",), 255, "digest is 255, but must be up to 16 hexadecimal digits"),
    (("digest",), "0" * 17, "digest is '00000000000000000', but must be up to 16 hexadecimal digits"),
    (("digest",), "00ff\n", "digest is '00ff\\n', but must be up to 16 hexadecimal digits"),
    (("tokens",), -1, "tokens is -1, but must be at least 0"),
    (("config_fingerprint",), None, "config_fingerprint is None, but must be text"),
    (("versions",), ["torch"], "versions is ['torch'], but must be a mapping"),
    (("versions", "torch"), 2, "versions.torch is 2, but must be text"),
    (("metrics",), None, "metrics is None, but must be a mapping"),
    (("metrics", "loss"), "low", "metrics.loss is 'low', but must be a number"),
    (("metrics", "loss"), None, "metrics.loss is None, but must be a number"),
    (("metrics", "loss"), True, "metrics.loss is True, but must be a number"),
    (("metrics", "loss"), 10**400, f"metrics.loss is {10**76}..., but must be a number"),
    (("reason",), 5, "reason is 5, but must be text"),
    (("written_at",), "today", "written_at is 'today', but must be a number"),
    (("written_at",), math.nan, "written_at is nan, but must be a finite number"),
    (("written_at",), 1e300, "written_at is 1e+300, but must be below 253402300800.0"),
    (("run",), "\ud800", "run is '\\ud800', but must be text that UTF-8 can hold"),
    (("extra",), "none", "extra is 'none', but must be a mapping"),
    (("tensors",), [], "tensors is [], but must be a mapping"),
    (("tensors", WEIGHT), None, f"tensors.{WEIGHT} is None, but must be a mapping"),
    (("tensors", WEIGHT, "shape"), "10", f"tensors.{WEIGHT}.shape is '10', but must be a list"),
    (("tensors", WEIGHT, "shape"), [-10], f"tensors.{WEIGHT}.shape[0] is -10, but must be at least 0"),
    (("tensors", WEIGHT, "shape"), [10.0], f"tensors.{WEIGHT}.shape[0] is 10.0, but must be a whole number"),
    (("tensors", WEIGHT, "shape"), [2**40, 2**40], "more than any file can hold"),
    (("tensors", WEIGHT, "dtype"), "F8", f"tensors.{WEIGHT}.dtype: dtype 'F8' is unknown; known are ['BF16',"),
    (("tensors", WEIGHT, "dtype"), None, f"tensors.{WEIGHT}.dtype is None, but must be text"),
    (("tensors", WEIGHT, "dtype"), "F64", "bytes is 262710, but its header, intervals and checksums come to 393798"),
    (("tied",), None, "tied is None, but must be a mapping"),
    (("tied", "head.weight"), 1, "tied.head.weight is 1, but must be text"),
    (("optimizer",), None, "optimizer is None, but must be a mapping"),
    (("optimizer", "step"), -1, "optimizer.step is -1, but must be at least 0"),
    (("optimizer", "groups"), {}, "optimizer.groups is {}, but must be a list"),
    (("optimizer", "groups", 1), 5, "optimizer.groups[1] is 5, but must be a mapping"),
    (("optimizer", "group_of"), {}, "optimizer.group_of has no group for 'layer.weight'"),
    (("optimizer", "group_of", "norm"), 2, "optimizer.group_of.norm is 2, not one of the 2 groups"),
    (("optimizer", "group_of", "norm"), False, "optimizer.group_of.norm is False, but must be a whole number"),
    (("counters",), [], "counters is [], but must be a mapping"),
    (("counters", "global_steps"), 6.5, "counters.global_steps is 6.5, but must be a whole number"),
    (("shards",), None, "shards is None, but must be a list"),
    (("shards",), [], f"shards are 0, but each of 2 ranks has written one ({MOMENT} has {NUM_LARGE} elements, but 0"),
    (FIRST, "a shard", "shards[0] is 'a shard', but must be a mapping"),
    ((*SECOND, "file"), "../../x", "shards[1].file is '../../x', which is outside the checkpoint"),
    ((*SECOND, "file"), "/etc/passwd", "shards[1].file is '/etc/passwd', which is outside the checkpoint"),
    ((*SECOND, "file"), "attempt-0003/../../x", "which is outside the checkpoint"),
    ((*SECOND, "file"), "attempt-0003/./x", "which is no file in attempt-0003"),
    ((*SECOND, "file"), "attempt-0003/x\0", "which is no file in attempt-0003"),
    ((*SECOND, "file"), "attempt-0003/" + "x" * 999, "which is no file in attempt-0003"),
    ((*SECOND, "file"), "attempt-0001/rank-00001-of-00002.safetensors", "which is no file in attempt-0003"),
    ((*SECOND, "file"), 5, "shards[1].file is 5, but must be text"),
    ((*SECOND, "file"), shard_file(3, 0, 2), f"shards[1].file is '{shard_file(3, 0, 2)}', which another one has"),
    ((*FIRST, "bytes"), "12", "shards[0].bytes is '12', but must be a whole number"),
    ((*FIRST, "bytes"), 12, "shards[0].bytes is 12, but its header, intervals and checksums come to 262710"),
    ((*FIRST, "bytes"), 10**30, f"shards[0].bytes is {10**30}, but must be below {2**63}"),
    ((*FIRST, "header_bytes"), -8, "shards[0].header_bytes is -8, but must be at least 9"),
    ((*FIRST, "header_bytes"), 8, "shards[0].header_bytes is 8, but must be at least 9"),
    ((*FIRST, "header_bytes"), 10**30, f"shards[0].header_bytes is {10**30}, but must be below {2**63}"),
    ((*FIRST, "header_bytes"), 504, "shards[0].bytes is 262710, but its header, intervals and checksums come to"),
    ((*FIRST, "header_xxh3"), 2**64, f"shards[0].header_xxh3 is {2**64}, but must be below {2**64}"),
    ((*FIRST, "block_sums_xxh3"), None, "shards[0].block_sums_xxh3 is None, but must be a whole number"),
    (
        (*FIRST, "interval_fields"),
        ["key", "stop", "start"],
        "shards[0].interval_fields[1] is 'stop', but must be 'start'",
    ),
    ((*FIRST, "intervals"), {}, "shards[0].intervals is {}, but must be a list"),
    (ROW, [WEIGHT, -1, 5], "shards[0].intervals[0][1] is -1, but must be at least 0"),
    (ROW, [WEIGHT, 5, 0], f"shards[0].intervals[0] is ['{WEIGHT}', 5, 0], not an interval of its 65536 elements"),
    (ROW, [WEIGHT, 0, 65537], "not an interval of its 65536 elements"),
    (ROW, [WEIGHT, 0, 10**18], "not an interval of its 65536 elements"),
    (
        ROW,
        [WEIGHT, 0.0, float(HALF)],
        "shards[0].intervals[0][1] is 0.0, but must be a whole number; shards[0].intervals[0][2] is 32768.0",
    ),
    (
        ROW,
        [WEIGHT, "0", str(HALF)],
        "shards[0].intervals[0][1] is '0', but must be a whole number; shards[0].intervals[0][2] is '32768'",
    ),
    (ROW, [WEIGHT, False, HALF], "shards[0].intervals[0][1] is False, but must be a whole number"),
    (ROW, ["nobody", 0, 5], "shards[0].intervals[0] is ['nobody', 0, 5], which is of no tensor of the state"),
    (ROW, [[], 0, 5], "shards[0].intervals[0][0] is [], but must be text"),
    (ROW, [WEIGHT, 0], "shards[0].intervals[0][2] is missing"),
    (ROW, WEIGHT, f"shards[0].intervals[0] is '{WEIGHT}', but must be a list"),
    (ROW, [MOMENT, 0, HALF], f"shards[0].intervals[1] is ['{MOMENT}', 0, 32768], whose tensor the shard holds already"),
    (ROW, [WEIGHT, 0, 6], "but its header, intervals and checksums come to"),
]


@pytest.mark.parametrize(
    ("path", "value", "text"), WRONG, ids=[f"{'.'.join(map(str, path))}={value!r:.20}" for path, value, _ in WRONG]
)
def test_a_wrong_field_is_refused_and_named(path: tuple[Any, ...], value: object, text: str) -> None:
    with pytest.raises(ManifestError) as refused:
        Manifest.from_bytes(signed(replaced(path, value)))
    assert str(refused.value).startswith("the manifest's ")
    assert text in str(refused.value)
    # What stands beside state and shards is refused in the same words by who reads only that.
    store = MemoryStore()
    store.create(manifest_key(6), [signed(replaced(path, value))])
    is_of_state = str(refused.value).removeprefix("the manifest's ").startswith(STATE_FIELDS)
    same = pytest.raises(ManifestError, match=f"^{re.escape(str(refused.value))}$")
    with contextlib.nullcontext() if is_of_state else same:
        assert read_facts(store, 6)[0].step == 6


def _is_needed(path: tuple[Any, ...]) -> bool:
    """Whether a field must be there; what is in some is the loop's, the engine's or the model's business."""
    is_open = path[0] in ("cursor", "extra", "metrics", "versions", "counters", "tied") and len(path) > 1
    return isinstance(path[-1], str) and not is_open and "groups" not in path[:-1] and path[-1] != "buffer/none"


NEEDED = [path for path in PATHS if _is_needed(path)]


@pytest.mark.parametrize("path", NEEDED, ids=[".".join(map(str, path)) for path in NEEDED])
def test_no_field_may_be_missing(path: tuple[Any, ...]) -> None:
    with pytest.raises(ManifestError) as refused:
        Manifest.from_bytes(signed(removed(path)))
    if path[-1] in TENSORS:
        assert "which is of no tensor of the state" in str(refused.value)
    elif path[:2] == ("optimizer", "group_of") and len(path) == 3:
        assert str(refused.value) == f"the manifest's optimizer.group_of has no group for '{path[-1]}'"
    else:
        assert str(refused.value).endswith(f"{path[-1]} is missing")


@pytest.mark.parametrize("name", ["cursor", "extra", "group"])
def test_values_of_the_loop_may_be_nested_but_not_without_end(name: str) -> None:
    def nested(levels: int) -> object:
        value: object = 1
        for _ in range(levels):
            value = {"in": [value]}
        return value

    path = ("optimizer", "groups", 0, "lr") if name == "group" else (name, "new")
    Manifest.from_bytes(signed(replaced(path, nested(20))))
    with pytest.raises(ManifestError, match="but must not be nested deeper than 50 levels"):
        Manifest.from_bytes(signed(replaced(path, nested(30))))


_NUMBERS = st.sampled_from([-1, 0, 1, 2, 8, 9, 2**31, 2**63, 2**64, 10**30, 10**400]) | st.integers()
_SCALARS = st.none() | st.booleans() | _NUMBERS | st.floats() | st.text(max_size=20)
_LONE_HALVES = st.sampled_from(["\ud800", "a\0b", "../../x", "/etc/passwd", "attempt-0003/x", "F64", "F8", WEIGHT])
_VALUES = st.recursive(
    _SCALARS | _LONE_HALVES,
    lambda child: st.lists(child, max_size=4) | st.dictionaries(st.text(max_size=8), child, max_size=4),
    max_leaves=8,
)


@settings(max_examples=examples(1500))
@given(
    path=st.sampled_from(PATHS),
    kind=st.sampled_from(["replace", "remove", "other", "add", "twice"]),
    value=_VALUES,
    other=st.sampled_from(PATHS),
)
@example(path=("step",), kind="replace", value=10**400, other=("step",))
@example(path=("written_at",), kind="replace", value=10**400, other=("step",))
def test_any_one_change_is_refused_or_gives_a_manifest_that_holds(
    path: tuple[Any, ...], kind: str, value: Any, other: tuple[Any, ...]
) -> None:
    """With the checksum made right, so that nothing but the fields' own checks stands in its way."""

    def change(holder: Any, key: Any) -> None:
        if kind == "remove":
            del holder[key]
        elif kind == "other":
            found: Any = tree()
            for part in other:
                found = found[part]
            holder[key] = copy.deepcopy(found)
        elif kind == "add" and isinstance(holder[key], dict):
            holder[key]["new"] = value
        elif kind == "add" and isinstance(holder[key], list):
            holder[key].append(value)
        elif kind == "twice" and isinstance(holder, list):
            holder.append(holder[key])
        else:
            holder[key] = value

    try:
        read = Manifest.from_bytes(signed(changed(path, change)))
    except ManifestError:
        return
    assert Manifest.from_bytes(read.to_bytes()).to_bytes() == read.to_bytes()
    assert min(read.attempt, read.world_size, read.meta.sp_size) >= 1
    assert len(read.shards) == len({shard.file for shard in read.shards}) == read.world_size
    assert all(shard.file.startswith(f"attempt-{read.attempt:04d}/") for shard in read.shards)
    assert all(isinstance(math.isfinite(number), bool) for number in read.meta.metrics.values())
    assert 0 <= int(read.meta.digest, 16) < 2**64
    for shard in read.shards:
        ends = [stored.offset + stored.num_bytes for stored in shard.intervals]
        begins = [stored.offset for stored in shard.intervals]
        assert [shard.header_bytes, *ends] == [*begins, shard.sums_offset]
        assert all(one.num_bytes % read.state.tensors[one.interval.key].item_bytes == 0 for one in shard.intervals)
    held = [stored.interval for shard in read.shards for stored in shard.intervals]
    # Whether it is all there is looked at by who reads it, which is no part of the file's own truth.
    with contextlib.suppress(CoverError):
        check_cover({key: spec.num_elements for key, spec in read.state.tensors.items()}, held)
