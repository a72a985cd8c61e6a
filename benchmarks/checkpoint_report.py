"""What a run of ``bench_checkpoint.py`` says, from its record: pure text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.checkpoint_estimate import estimate_text
from benchmarks.stored_result import MIB, NOT_MEASURED, met, origin, spread, table

STALL_GOAL, LOAD_GOAL = 0.1, 3.0
READ_GOAL = 1.05
"""Bytes read over bytes needed that count as about equal."""

RULES = """\
How to read it: both sides save and load the same engine in the same processes, in turn, in an order that alternates
from round to round; a time is that of the slowest rank, a ratio is of the same round, and each stands as median with
minimum and maximum. The first save of each side is told apart. What was written before is brought to the disk before
each part (`sync`), and what was saved is warm in the page cache unless a row says cold (`posix_fadvise`). Starting
processes, imports and building the engine are left out of every time. **Theirs** is DeepSpeed's `save_checkpoint`,
`ds_to_universal` (its command's defaults) and `load_checkpoint` with `load_universal`. Theirs neither brings its files
to the disk nor reads them back; ours writes each shard, `fsync`s it, reads it back against its checksums and commits
the manifest. Theirs holds 12 bytes a parameter, ours 14: the bf16 model besides, for export and evaluation. Bounds are
of the same round, all ranks at once: copying (the fastest of three), writing with `fsync` in calls of 16 MiB, or
reading as much as a rank saves (at most 256 MiB, scaled up). CPU seconds are of a rank's whole process."""


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as a page."""
    worlds = record["worlds"]
    parts = [
        ("The step stands still", _stall(worlds)),
        ("The steps beside a save", _beside(worlds)),
        ("Beside torch's `async_save` and `load`", _dcp(worlds)),
        ("Until a save is committed", _save(worlds)),
        ("Loading on half as many ranks", _load(worlds)),
        ("Bytes read to load", _bytes(worlds)),
        ("Memory", _memory(worlds)),
        ("What is in the engine after a load", _exactness(worlds)),
        ("8B at 64 ranks: calculated", estimate_text(record["estimate"])),
    ]
    size = record["size"]
    about = (
        f"A random Llama of {worlds[0]['saves'][0]['num_parameters'] / 1e6:,.1f}M parameters ({size['layers']} layers, "
        f"hidden size {size['hidden']}), ZeRO-3, bf16 with fp32 master weights and AdamW; a step takes "
        f"{size['tokens']} tokens a rank. {len(worlds[0]['saves'][0]['rounds']) - 1} rounds after the first save."
    )
    sections = "\n\n".join(f"## {title}\n\n{text}" for title, text in parts)
    title = "# Checkpoints: ours beside DeepSpeed's save, conversion and universal load"
    return "\n\n".join([title, origin(record), RULES, about, sections])


def summary(world: Mapping[str, Any]) -> str:
    """Return a world's ratios in a line."""
    loads = _load_ratios(world, is_cold=False)
    return (
        f"{world['world_size']} ranks: stall/their save {spread(stall_ratios(world, 'ours'), '{:.1%}')}, "
        f"their conversion and load/our load {spread(loads) if loads else NOT_MEASURED}"
    )


def over_ranks(
    ranks: Sequence[Mapping[str, Any]],
    part: str,
    name: str,
    rounds: slice = slice(1, None),
    reduce: Callable[[Iterable[float]], float] = max,
) -> list[float]:
    """Return one figure a round, of the slowest or largest rank or otherwise reduced; ranks without it are left out."""
    chosen = [rank["rounds"][rounds] for rank in ranks]
    return [reduce(one[part][name] for one in each if name in one[part]) for each in zip(*chosen, strict=True)]


def stall_ratios(world: Mapping[str, Any], part: str) -> list[float]:
    """Return our stall over their save, round by round."""
    return _ratios(over_ranks(world["saves"], part, "stall_s"), over_ranks(world["saves"], "theirs", "seconds"))


def stall_cpu_ratios(world: Mapping[str, Any]) -> list[float]:
    """Return the CPU time of our stall over that of their save, round by round."""
    return _ratios(over_ranks(world["saves"], "ours", "stall_cpu_s"), over_ranks(world["saves"], "theirs", "cpu_s"))


def slowed_s(beside: Mapping[str, Any]) -> float:
    """Return by how many seconds the steps beside a save were longer than as many without one."""
    steps: Sequence[float] = beside["beside_steps_s"]
    return sum(steps) - len(steps) * median(beside["quiet_steps_s"])


def warm_or_cold(world: Mapping[str, Any], *, is_cold: bool) -> dict[str, Any]:
    """Return a world's loads with the rounds of one kind alone."""
    return {
        "saves": world["saves"],
        "loads": [
            {**rank, "rounds": [one for one in rank["rounds"] if one["is_cold"] == is_cold]} for rank in world["loads"]
        ],
    }


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def _of_bound(
    ranks: Sequence[Mapping[str, Any]], name: str, num_bytes: float, rounds: slice = slice(1, None)
) -> list[float]:
    """Return the seconds that the bound of each round would take for so many bytes."""
    measured = over_ranks(ranks, "bounds", "num_bytes", rounds)
    return [s * num_bytes / one for s, one in zip(over_ranks(ranks, "bounds", name, rounds), measured, strict=True)]


def _state_bytes(world: Mapping[str, Any]) -> float:
    return float(max(rank["state_bytes"] for rank in world["saves"]))


def _s(values: Sequence[float]) -> str:
    return spread(values, "{:.3f}") + " s"


def _dcp(worlds: Sequence[Mapping[str, Any]]) -> str:
    """Return what torch's own distributed checkpoint takes for the same parts, in the same rounds."""
    if "dcp" not in worlds[0]["saves"][0]["rounds"][0]:
        return f"{NOT_MEASURED}."
    rows = []
    for world in worlds:
        saves, loads = world["saves"], [_warm(rank) for rank in world["loads"]]
        cells = [str(world["world_size"])]
        pairs = [(saves, name, slice(1, None)) for name in ("stall_s", "stall_cpu_s", "save_s")]
        for ranks, name, rounds in (*pairs, (loads, "seconds", slice(None)), (loads, "cpu_s", slice(None))):
            ours, theirs = (over_ranks(ranks, side, name, rounds) for side in ("ours", "dcp"))
            cells += [f"{_s(ours)} / {_s(theirs)}", spread(_ratios(ours, theirs))]
        rows.append(cells)
    head = ["ranks"]
    for what in ("stall", "stall, CPU time", "until committed", "warm load on half the ranks", "its CPU time"):
        head += [f"{what}: ours / torch's", "ratio"]
    same = {load["digest"] for world in worlds for rank in world["loads"] for load in [rank["rounds"][0]["dcp"]]}
    wanted = {rank["digest"] for world in worlds for rank in world["saves"]}
    verdict = "the same" if same <= wanted else "**not the same**"
    return (
        f"{table(head, rows)}\n\nIts saves are brought to the disk (`sync_files`), but not read back; its copy goes "
        "into buffers that were made before the first save. The state in the engine after its load is "
        f"{verdict} as was saved."
    )


def _warm(rank: Mapping[str, Any]) -> dict[str, Any]:
    return {"rounds": [one for one in rank["rounds"] if not one["is_cold"]]}


def _stall(worlds: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for world in worlds:
        saves, first = world["saves"], slice(0, 1)
        ratios, beside = stall_ratios(world, "ours"), stall_ratios(world, "beside")
        first_ours, first_theirs = (
            over_ranks(saves, "ours", "stall_s", first)[0],
            over_ranks(saves, "theirs", "seconds", first)[0],
        )
        rows.append(
            [
                f"{world['world_size']}",
                _s(over_ranks(saves, "theirs", "seconds")),
                _s(over_ranks(saves, "ours", "stall_s")),
                f"**{spread(ratios, '{:.1%}')}**",
                f"**{spread(beside, '{:.1%}')}**",
                met(max(median(ratios), median(beside)) <= STALL_GOAL),
                f"**{spread(stall_cpu_ratios(world), '{:.1%}')}**",
                met(median(stall_cpu_ratios(world)) <= STALL_GOAL),
                _s(_of_bound(saves, "copy_s", _state_bytes(world))),
                f"{first_ours:.3f} s, {first_ours / first_theirs:.1%}",
                _s(over_ranks(saves, "ours", "source_s")),
                f"{max(rank['reserved']['seconds'] for rank in saves):.3f} s",
            ]
        )
    head = (
        "ranks", "their save", "our stall", "ours/theirs", "the same, before steps", "goal", "CPU time: ours/theirs",
        "goal by CPU time", "bound: copying it", "our first", "of ours: finding the parts", "making the buffer, once",
    )  # fmt: skip
    text = (
        f"Goal: at most {STALL_GOAL:.0%} of their save, in which training stands still to its end. CPU time is what "
        "the processes were given of the two cores: other work disturbs it less than it does the clock. The loop makes "
        "its buffer after the first step, before any save."
    )
    return f"{text}\n\n{table(head, rows)}"


def _beside(worlds: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for world in worlds:
        saves = world["saves"]
        beside = [one["beside"] for one in saves[0]["rounds"][1:]]
        slowed = [slowed_s(one) for one in beside]
        stalls, theirs = over_ranks(saves, "beside", "stall_s"), over_ranks(saves, "theirs", "seconds")
        costs = [stall + extra for stall, extra in zip(stalls, slowed, strict=True)]
        rows.append(
            [
                f"{world['world_size']}",
                _s([median(one["quiet_steps_s"]) for one in beside]),
                _s([sum(one["beside_steps_s"]) / len(one["beside_steps_s"]) for one in beside]),
                spread([len(one["beside_steps_s"]) for one in beside], "{:.0f}"),
                _s(slowed),
                _s(costs),
                _s(theirs),
                f"**{spread(_ratios(costs, theirs))}**",
                *(spread(over_ranks(saves, side, "cpu_s"), "{:.2f}") for side in ("ours", "theirs")),
            ]
        )
    head = (
        "ranks", "step without", "step beside a save", "such steps", "longer in all", "with the stall",
        "their save", "ours/theirs", "CPU s of a save: ours", "theirs",
    )  # fmt: skip
    text = (
        "Here ranks, steps and the threads that write share two cores, which a machine with GPUs does not: a step's "
        "arithmetic gives way to checksums and copies. A step counts as beside a save if it began before the commit "
        "was known. `longer` can be negative by chance."
    )
    return f"{text}\n\n{table(head, rows)}"


def _save(worlds: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for world in worlds:
        saves = world["saves"]
        alone, theirs = over_ranks(saves, "ours", "save_s"), over_ranks(saves, "theirs", "seconds")
        synced = [one + sync for one, sync in zip(theirs, over_ranks(saves, "theirs", "sync_s"), strict=True)]
        parts = "; ".join(
            f"{said} {median(over_ranks(saves, 'ours', name)):.3f}"
            for name, said in (
                ("stall_s", "copy"), ("write_s", "write and `fsync`"), ("check_s", "read back"), ("commit_s", "commit"),
            )
        )  # fmt: skip
        rows.append(
            [
                f"{world['world_size']}",
                f"{_state_bytes(world) / MIB:,.0f} MiB",
                _s(alone),
                parts,
                _s(over_ranks(saves, "beside", "save_s")),
                _s(theirs),
                f"**{spread(_ratios(alone, theirs))}**",
                _s(synced),
                f"**{spread(_ratios(alone, synced))}**",
                _s(_of_bound(saves, "write_s", _state_bytes(world))),
            ]
        )
    head = (
        "ranks", "ours: a rank's bytes", "ours, nothing beside it", "of it, medians in s", "ours beside steps",
        "theirs", "ours/theirs", "theirs and `fsync`", "ours/that", "bound: writing ours",
    )  # fmt: skip
    return table(head, rows)


def _load_seconds(world: Mapping[str, Any], *, is_cold: bool) -> dict[str, list[float]] | None:
    """Return the seconds of each part of a load, round by round; None if a part of theirs failed."""
    loads, every = warm_or_cold(world, is_cold=is_cold)["loads"], slice(None)
    if any(one["theirs"] is None for one in loads[0]["rounds"]):
        return None
    return {
        "ours": over_ranks(loads, "ours", "seconds", every),
        "conversion": over_ranks(loads, "conversion", "seconds", every),
        "theirs": over_ranks(loads, "theirs", "seconds", every),
    }


def _load_ratios(world: Mapping[str, Any], *, is_cold: bool) -> list[float]:
    found = _load_seconds(world, is_cold=is_cold)
    if found is None:
        return []
    whole = [one + other for one, other in zip(found["conversion"], found["theirs"], strict=True)]
    return _ratios(whole, found["ours"])


def _load(worlds: Sequence[Mapping[str, Any]]) -> str:
    rows, failures = [], []
    for world in worlds:
        for is_cold in (False, True):
            kind = "cold" if is_cold else "warm"
            rounds = warm_or_cold(world, is_cold=is_cold)["loads"][0]["rounds"]
            failures += [one["conversion"]["failure"] for one in rounds if "failure" in one["conversion"]]
            found = _load_seconds(world, is_cold=is_cold) if rounds else None
            layout = f"{world['world_size']} → {len(world['loads'])}, {kind}"
            if found is None:
                rows.append([layout, f"{len(rounds)}", *[NOT_MEASURED] * 7])
                continue
            ratios = _load_ratios(world, is_cold=is_cold)
            rows.append(
                [
                    layout,
                    f"{len(rounds)}",
                    _s(found["ours"]),
                    _s(found["conversion"]),
                    _s(found["theirs"]),
                    f"**{spread(ratios, '{:.1f}')}**",
                    met(median(ratios) >= LOAD_GOAL),
                    spread(_ratios(found["theirs"], found["ours"]), "{:.2f}"),
                    NOT_MEASURED if is_cold else _s(_read_bound(world)),
                ]
            )
    head = (
        "ranks", "rounds", "ours", "their conversion", "their load", "their conversion and load/ours", "goal",
        "their load alone/ours", "bound: reading what is needed",
    )  # fmt: skip
    text = (
        f"Goal: at least {LOAD_GOAL:.0f} times faster than conversion and load. Ours is what a resumed attempt does: "
        "find the newest checkpoint, read its manifest, and import its state, every byte verified. Nothing of ours is "
        "converted."
    )
    told = "".join(f"\n\nTheirs failed: {failure}" for failure in failures[:1])
    return f"{text}\n\n{table(head, rows)}{told}"


def _read_bound(world: Mapping[str, Any]) -> list[float]:
    loads = warm_or_cold(world, is_cold=False)["loads"]
    return _of_bound(loads, "read_s", max(rank["needed_bytes"] for rank in loads), slice(None))


def _bytes(worlds: Sequence[Mapping[str, Any]]) -> str:
    rows, every = [], slice(None)
    for world in worlds:
        loads = world["loads"]
        needed = max(rank["needed_bytes"] for rank in loads)
        returned = max(over_ranks(loads, "ours", "returned_bytes", every))
        rows.append(
            [
                f"{world['world_size']} → {len(loads)}",
                f"{needed / MIB:,.1f} MiB",
                f"{returned / MIB:,.1f} MiB",
                f"**{returned / needed:.3f}**",
                met(returned <= READ_GOAL * needed),
                f"{max(over_ranks(loads, 'ours', 'verified_bytes', every)) / MIB:,.1f} MiB",
                f"{max(over_ranks(loads, 'ours', 'read_bytes', every)) / MIB:,.1f} MiB",
                *_their_bytes(loads, needed),
            ]
        )
    head = (
        "ranks", "needed a rank", "ours: read a rank", "read/needed", "goal", "ours: verified besides",
        "ours, by the kernel", "theirs: load, a rank", "over needed", "theirs: conversion reads", "writes",
    )  # fmt: skip
    text = (
        "Ours is what `load_parts` returns: whole blocks of 64 KiB and their checksums. Verified besides "
        "is what nobody has to load, so that a checkpoint is taken as whole or not at all: headers, and the bf16 model "
        "that is kept for export; the ranks share it. By the kernel is `rchar` of `/proc/self/io` over the whole load, "
        "with the manifest, and what gloo passes through `read`. The conversion runs once, on one machine."
    )
    return f"{text}\n\n{table(head, rows)}"


def _their_bytes(loads: Sequence[Mapping[str, Any]], needed: float) -> list[str]:
    if any(one["theirs"] is None for one in loads[0]["rounds"]):
        return [NOT_MEASURED] * 4
    every = slice(None)
    read = max(over_ranks(loads, "theirs", "read_bytes", every))
    passed = [max(over_ranks(loads, "conversion", name, every)) for name in ("read_bytes", "written_bytes")]
    return [f"{read / MIB:,.1f} MiB", f"**{read / needed:.2f}**", *(f"{one / MIB:,.1f} MiB" for one in passed)]


def _memory(worlds: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for world in worlds:
        saves, loads, first, every = world["saves"], world["loads"], slice(0, 1), slice(None)
        has_theirs = all(one["theirs"] is not None for one in loads[0]["rounds"])
        largest = {
            "our first save, beyond its buffer": over_ranks(saves, "ours", "grown_bytes", first),
            "their first save": over_ranks(saves, "theirs", "grown_bytes", first),
            "our load": over_ranks(loads, "ours", "grown_bytes", every),
            "their load": over_ranks(loads, "theirs", "grown_bytes", every) if has_theirs else [],
            "their conversion, all its processes": (
                over_ranks(loads, "conversion", "peak_bytes", every) if has_theirs else []
            ),
        }
        for name, values in largest.items():
            shown = f"{max(values) / MIB:,.0f} MiB" if values else NOT_MEASURED
            rows.append([f"{world['world_size']}", name, shown])
        buffers = max(rank["buffer_bytes"] for rank in saves)
        rows.append([f"{world['world_size']}", "our buffer, which stays", f"{buffers / MIB:,.0f} MiB"])
        moments = max(rank["needed_bytes"] for rank in loads) * 2 / 3
        rows.append(
            [f"{world['world_size']}", "bound of a load: the moments that it makes", f"{moments / MIB:,.0f} MiB"]
        )
    text = (
        "Peak of resident memory of a rank beyond what was resident before, the largest rank and round; of the "
        "conversion the peak of all its processes, shared pages counted once. We make a second buffer only when a "
        "save begins while the one before it is still being written."
    )
    return f"{text}\n\n{table(('ranks', 'what', 'peak'), rows)}"


def _exactness(worlds: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for world in worlds:
        saved = world["saves"][0]
        for side in ("ours", "theirs"):
            rounds = [one[side] for one in world["loads"][0]["rounds"] if one[side] is not None]
            groups = {tuple(one["weight_decays"]) for one in rounds}
            rows.append(
                [
                    f"{world['world_size']} → {len(world['loads'])}",
                    side,
                    "bitwise" if rounds and all(one["digest"] == saved["digest"] for one in rounds) else "**differs**",
                    "; ".join(", ".join(map(str, group)) for group in sorted(groups)) or NOT_MEASURED,
                    ", ".join(map(str, saved["weight_decays"])),
                ]
            )
    text = (
        "Weights, master weights and moments were overwritten before each load; a checksum over every element and its "
        "place is compared with that of the saving engine. The weight decays of the two optimizer groups tell whether "
        "groups keep their own settings."
    )
    return f"{text}\n\n{table(('ranks', 'side', 'state', 'weight decays after it', 'saved'), rows)}"
