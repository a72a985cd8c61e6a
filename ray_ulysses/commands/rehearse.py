"""The command ``rehearse``: trains a copy of a run under injected faults and reports the result in Markdown."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ray_ulysses import __version__
from ray_ulysses.commands.options import ConfigPath, Overrides, Quiet, load_run_config
from ray_ulysses.commands.output import Waiting, put, put_line
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.report.words import as_text, duration, facts, minutes, percent

if TYPE_CHECKING:
    from ray_ulysses.cluster.capacity import Demand
    from ray_ulysses.cluster.local_cluster import LocalCluster
    from ray_ulysses.cluster.rehearsal import Request
    from ray_ulysses.config import Config
    from ray_ulysses.rehearsal.recoveries import LossComparison, Recovery, RehearsalReport
    from ray_ulysses.rehearsal.schedule import Fault, FaultKind, FaultTargets

EXAMPLE = "Example: ray-ulysses rehearse config.yaml --faults '40s kill-node, 90s drain-node, 2m add-node'"
_NODES = 2
_STORY: dict[bool, str] = {
    True: "30s kill-node, 60s add-node, 100s drain-node, 130s add-node",
    False: "30s kill-worker, 60s stop-worker, 90s kill-agent, 120s kill-driver",
}
"""Default fault schedules: for nodes that the rehearsal starts (True), and for an existing cluster (False)."""
_GROW_EVERY_S = 5.0
_MAX_FAILURES = 1000
_HEAD_CPUS, _CPUS = 1, 2
_COLUMNS = (
    "at", "fault", "noticed", "formed", "loaded", "first step", "pause", "steps lost", "workers", "what happened"
)  # fmt: skip


def rehearse(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006
    faults: Annotated[str | None, typer.Option(help="Times and kinds of faults, or a file that lists them.")] = None,
    every: Annotated[
        str | None, typer.Option(help="Inject random faults with this mean interval instead, such as 60s.")
    ] = None,
    lasts: Annotated[str | None, typer.Option("--for", help="Minimum training time, such as 30m.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random faults and their targets.")] = 0,
    kinds: Annotated[str | None, typer.Option(help="Kinds of random faults, separated by commas.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes to start on this machine.  [default: 2]", min=1)] = None,
    drain: Annotated[str, typer.Option(help="Time from a drain to the node's end.")] = "30s",
    compare: Annotated[
        int | None, typer.Option(help="Maximum number of steps of the run without faults.  [default: all]", min=0)
    ] = None,
    min_ettr: Annotated[
        float | None, typer.Option(help="Minimum percentage of the time spent on steps that count.", min=0, max=100)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the report to this .md file, and as .json next to it.")
    ] = None,
    note: Annotated[str | None, typer.Option(help="A line for the report, such as a commit.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Inject faults into a cluster without confirmation.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a copy of a run under injected faults, and prove that no row was lost or repeated.

    Uses the cluster at RAY_ADDRESS or cluster.address, or else starts several nodes on this machine. The faults are
    listed first, with times relative to the run's first step. Exits with 1 if a check fails.

    \b
    kill-worker, crash-worker, stop-worker   a training process receives SIGKILL, SIGSEGV or SIGSTOP
    kill-agent                               a peer memory agent is killed
    kill-driver                              the command is killed and started again
    kill-node, drain-node                    a node is lost without notice, or drained first
    add-node                                 a node replaces a lost node (on this machine only)
    """  # noqa: D301 -- click's mark for text that is not to be rewrapped
    options = dict(locals())
    for name in ("config", "overrides", "out", "yes", "quiet"):
        del options[name]
    loaded = load_run_config(config, overrides)
    with Waiting("loading libraries", is_quiet=quiet):
        importlib.import_module("ray_ulysses.cluster.rehearsal")

    def say(line: str) -> None:
        if not quiet:
            put_line(line)

    def confirm(name: str, intent: str) -> bool:
        if not (yes and quiet):
            put(intent)
        return yes or bool(typer.prompt(f"Type {name} to start", default="", show_default=False) == name)

    report = run_rehearsal(loaded, RehearseOptions(**options), confirm=confirm, say=say)
    say("")
    put(render_report(report))
    if out is not None:
        from ray_ulysses.storage.atomic import write_text

        base = out.with_suffix("") if out.suffix == ".md" else out
        base.parent.mkdir(parents=True, exist_ok=True)
        write_text(base.with_suffix(".md"), render_report(report) + "\n")
        write_text(base.with_suffix(".json"), json.dumps(report.to_json(), indent=2) + "\n")
    if not report.holds:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearseOptions:
    """Command-line options of ``rehearse``."""

    faults: str | None
    """A fault schedule, or the path of a file that contains one."""
    every: str | None
    lasts: str | None
    """Minimum training time, such as ``30m``."""
    seed: int
    kinds: str | None
    nodes: int | None
    drain: str
    note: str | None
    compare: int | None
    """Maximum number of steps of the run without faults; 0 skips that run."""
    min_ettr: float | None
    """Minimum effective training time ratio (ETTR): the percentage of time spent on steps that count."""


def run_rehearsal(
    config: Config,
    options: RehearseOptions,
    *,
    confirm: Callable[[str, str], bool],
    say: Callable[[str], object],
) -> RehearsalReport:
    """Rehearse a configuration and return the report.

    Args:
        config: The user's configuration, as loaded.
        options: The options of the command line.
        confirm: Shows the user what will happen (second argument), asks for the rehearsal's name (first argument), and
            returns whether the user typed it.
        say: Prints a line of progress.

    Raises:
        UserError: The request is impossible or was not confirmed.
        RunError: A cluster could not be started or reached.
    """
    from ray_ulysses.cluster.address import cluster_address
    from ray_ulysses.cluster.session import ray_session

    address = cluster_address(config.cluster.address)
    if address is None:
        gpus = visible_gpus() if config.cluster.gpus_per_worker else ()
        request = _request(config, options, None, len(gpus))
        for line in _intent(request).split("\n"):
            say(line)
        with _local_cluster(request, gpus, say) as local:
            return _rehearse(request, options, local, say)
    with ray_session(address, cpus=0):
        request = _request(config, options, address, 0)
        if not confirm(request.prepared.config.run.name, _intent(request)):
            raise UserError("the rehearsal was not confirmed; nothing was started")
        return _rehearse(request, options, None, say)


def rehearsal_config(config: Config, *, address: str | None, stamp: str) -> Config:
    """Return the rehearsal's configuration: the user's configuration with the rehearsal's own settings.

    Args:
        config: The user's configuration, with absolute paths.
        address: Address of the cluster, or None to start a cluster on this machine.
        stamp: Suffix that makes the rehearsal's name unique.
    """
    from ray_ulysses.config.loading import parse_config

    name, elastic = f"{config.run.name}-rehearsal-{stamp}", config.elastic
    tree = config.model_dump(mode="json", exclude_unset=True)
    tree["run"] |= {"name": name, "storage": str(config.run_dir.parent / name)}
    tree["run"] |= {"stop_step": None, "profile": None, "early_stopping": None}
    tree.setdefault("elastic", {}).update(
        max_failures=max(elastic.max_failures, _MAX_FAILURES),
        grow_interval_s=min(elastic.grow_interval_s, _GROW_EVERY_S),
    )
    if address is None:
        # The CPUs of our own nodes are logical: the head has CPUs for the data stream, but not for a worker.
        tree["cluster"] |= {"cpus_per_worker": float(_CPUS), "data_cpus": _HEAD_CPUS / 4}
    return parse_config(tree)


def visible_gpus() -> tuple[str, ...]:
    """Return the CUDA_VISIBLE_DEVICES ids of the GPUs that torch finds on this machine."""
    import torch

    count = torch.cuda.device_count()
    shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return tuple(shown or map(str, range(count)))[:count]


def _request(config: Config, options: RehearseOptions, address: str | None, num_gpus: int) -> Request:
    """Validate the options before anything is started, and return the request."""
    from ray_ulysses.cluster.capacity import Demand
    from ray_ulysses.cluster.rehearsal import Request
    from ray_ulysses.run.preflight import prepare_run

    config = config.with_absolute_paths(Path.cwd())
    if address is not None and options.nodes is not None:
        raise UserError(f"--nodes={options.nodes}: the rehearsal uses the cluster at {address}; omit --nodes")
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    prepared = prepare_run(rehearsal_config(config, address=address, stamp=stamp), Path.cwd())
    prepared.report.raise_problems()
    nodes = None if address is not None else options.nodes or _NODES
    demand = Demand.of(prepared.run)
    targets = local_targets(demand, nodes, num_gpus) if nodes is not None else _cluster_targets(demand)
    every_s, for_s = _seconds("--every", options.every), _seconds("--for", options.lasts)
    return Request(
        prepared=prepared,
        faults=_faults(options, targets, every_s, for_s, is_local=nodes is not None),
        for_s=for_s or 0.0,
        drain_s=_seconds("--drain", options.drain) or 0.0,
        targets=targets,
        nodes=nodes,
    )


def _faults(
    options: RehearseOptions, targets: FaultTargets, every_s: float | None, for_s: float | None, *, is_local: bool
) -> tuple[Fault, ...]:
    from ray_ulysses.rehearsal.schedule import parse_faults, random_schedule, schedule_problems

    if every_s is not None:
        if options.faults is not None or for_s is None or every_s <= 0:
            raise UserError(f"--every={options.every}: random faults require --for; set --for and omit --faults")
        kinds = _kinds(options.kinds, is_local=is_local)
        faults = random_schedule(options.seed, every_s=every_s, for_s=for_s, targets=targets, kinds=kinds)
        problems: Sequence[str] = () if faults else [f"no fault is possible within --for={options.lasts}"]
    else:
        text = options.faults or _STORY[is_local]
        # A long schedule raises an error as a file name.
        with contextlib.suppress(OSError):
            text = Path(text).read_text(encoding="utf-8")
        faults, problems = parse_faults(text)
        problems = [*problems, *schedule_problems(faults, targets)]
    if problems:
        raise UserError("the faults can't be rehearsed:", *problems)
    return faults


def _kinds(text: str | None, *, is_local: bool) -> tuple[FaultKind, ...]:
    from ray_ulysses.rehearsal.schedule import KINDS, LOSES_A_NODE

    if text is None:
        # Nodes of an existing cluster are lost only on request.
        return KINDS if is_local else tuple(kind for kind in KINDS if kind not in LOSES_A_NODE)
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in KINDS]:
        raise UserError(f"--kinds={text}: unknown fault {unknown[0]!r}; use {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in names)


def _seconds(option: str, text: str | None) -> float | None:
    from ray_ulysses.rehearsal.schedule import parse_seconds

    seconds = None if text is None else parse_seconds(text)
    if text is not None and seconds is None:
        raise UserError(f"{option}={text}: is not a duration; use a format such as 90s, 1m30s or 2h")
    return seconds


def local_targets(demand: Demand, nodes: int, num_gpus: int) -> FaultTargets:
    """Return the layout of the cluster to start on this machine.

    Args:
        demand: The run's resource demand.
        nodes: Number of nodes to start.
        num_gpus: Number of GPUs of this machine; the nodes share them.

    Raises:
        UserError: A node's workers need more GPUs than this machine has.
    """
    from ray_ulysses.rehearsal.schedule import FaultTargets

    # Complete groups on each node, so that groups stay complete if a node is lost. With few GPUs, groups span nodes.
    sp_size = demand.wanted.sp_size
    per_node = math.ceil(demand.wanted.most / nodes / sp_size) * sp_size
    if demand.gpus and per_node > num_gpus:
        per_node = math.ceil(demand.wanted.most / nodes)
    if demand.gpus and per_node > num_gpus:
        more = f"use --nodes={math.ceil(demand.wanted.most / num_gpus)} (nodes share the GPUs), " if num_gpus else ""
        raise UserError(
            f"cluster.gpus_per_worker={demand.gpus}: each of {nodes} nodes runs {per_node} workers and needs a GPU for "
            f"each, but torch finds {num_gpus} GPUs on this machine; {more}set RAY_ADDRESS to rehearse on a cluster, "
            "or --set cluster.gpus_per_worker=0"
        )
    return FaultTargets(rooms=(per_node,) * nodes, elsewhere=0, least=demand.wanted.least)


def _cluster_targets(demand: Demand) -> FaultTargets:
    from ray_ulysses.cluster.capacity import node_of, room_for_workers
    from ray_ulysses.cluster.rehearsal import losable_nodes
    from ray_ulysses.cluster.session import steady_nodes
    from ray_ulysses.rehearsal.schedule import FaultTargets

    nodes, losable = steady_nodes(), losable_nodes()
    room = room_for_workers(demand, {node: node_of(one["Resources"]) for node, one in nodes.items()})
    whole = {node: workers // demand.wanted.sp_size * demand.wanted.sp_size for node, workers in room.items()}
    why = (
        "the rehearsal did not start this cluster and can't start nodes in it; omit the fault, and start a node "
        "yourself during training"
    )
    return FaultTargets(
        rooms=tuple(workers for node, workers in whole.items() if node in losable and workers),
        elsewhere=sum(workers for node, workers in whole.items() if node not in losable),
        least=demand.wanted.least,
        impossible={"add-node": why},
    )


def _intent(request: Request) -> str:
    from ray_ulysses.cluster.address import cluster_address
    from ray_ulysses.rehearsal.schedule import LOSES_A_NODE, MEANINGS

    config = request.prepared.config
    workers = f"{config.cluster.workers} workers, {config.parallel.sp_size} of which share a row"
    if request.nodes is not None:
        where = f"a local Ray cluster of {request.nodes} nodes with {request.targets.rooms[0]} workers each"
        where += ", which share its GPUs" * (config.cluster.gpus_per_worker > 0)
    else:
        where = f"the Ray cluster at {cluster_address(config.cluster.address)}"
        if not any(fault.kind in LOSES_A_NODE for fault in request.faults):
            where += "; other work on the cluster is not affected"
    rows = [
        ("trains", f"{workers}, until the faults are over; no other run is touched"),
        ("on", where),
        ("keeps", f"{config.run.storage} (may be deleted afterwards)"),
    ]
    if config.tracking.enabled:
        name = config.run.name
        rows.append(("MLflow", f"runs {name} and {name}-unbroken in experiment {config.tracking.experiment}"))
    notes = []
    if request.nodes is None and any(fault.kind == "kill-node" for fault in request.faults):
        notes.append(
            "kill-node kills Ray on one node of the cluster, with everything that Ray runs there, including tasks of "
            "other jobs. You must start Ray there again. The head node, the node of this command, and nodes with "
            "another job's actors or driver are spared"
        )
    if request.nodes is None and any(fault.kind == "drain-node" for fault in request.faults):
        notes.append(
            "drain-node drains one node of the cluster: Ray schedules no more work there, and you must start it again"
        )
    faults = [(minutes(one.at_s), f"{one.kind:<12} {MEANINGS[one.kind]}") for one in request.faults]
    lines = [f"rehearsal {config.run.name!r}", *facts(rows), "  faults, in time after the run's first step"]
    return as_text([*lines, *facts(faults, "    "), *(f"  note: {note}" for note in notes)])


@contextmanager
def _local_cluster(request: Request, gpus: Sequence[str], say: Callable[[str], object]) -> Iterator[LocalCluster]:
    from ray_ulysses.cluster.local_cluster import LocalCluster
    from ray_ulysses.cluster.session import ray_session

    assert request.nodes is not None
    say(f"starting {request.nodes} nodes on this machine")
    per_node, per_worker = request.targets.rooms[0], request.prepared.config.cluster.gpus_per_worker
    cluster = LocalCluster(
        cpus_per_node=_CPUS * per_node, head_cpus=_HEAD_CPUS, gpus_per_node=per_worker * per_node, gpus=gpus
    )
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.shutdown)
        for _ in range(request.nodes):
            cluster.add_node()
        stack.enter_context(ray_session(cluster.address, cpus=0))
        yield cluster


def _rehearse(
    request: Request,
    options: RehearseOptions,
    local: LocalCluster | None,
    say: Callable[[str], object],
) -> RehearsalReport:
    from ray_ulysses.cluster.rehearsal import rehearse, train_unbroken
    from ray_ulysses.config.loading import parse_config
    from ray_ulysses.config.schema import with_settings
    from ray_ulysses.rehearsal.check import TOLERANCES, report_rehearsal
    from ray_ulysses.tracking.history import read_history

    config = request.prepared.config
    if local is not None:
        config = parse_config(config.model_dump(mode="json", exclude_unset=True), [f"cluster.address={local.address}"])
    if not isinstance(config.run_dir, Path):
        raise UserError(
            f"run.storage={config.run.storage!r}: a rehearsal stores the nodes' logs and files next to its runs; use a "
            "path that every node can access, with --set run.storage=PATH"
        )
    folder = config.run_dir.parent
    say(f"training starts; its output: {folder / config.run.name}.log")
    began = time.monotonic()
    injected, problems = rehearse(
        request,
        config,
        folder,
        local=local,
        # Each default fault waits for the previous recovery, even on slow machines. Requested faults keep their times.
        patient=options.faults is None and options.every is None,
        seed=options.seed,
        say=say,
    )
    say(f"the faults are over after {time.monotonic() - began:.0f} s")
    unbroken, reached = None, read_history(config.run_dir).step
    steps = reached if options.compare is None else min(reached, options.compare)
    if steps:
        while local is not None and len(local.nodes) < (request.nodes or 0):
            local.add_node()
        say(f"training {steps} steps of the same run without faults, to compare the losses")
        beside = with_settings(config, {"run.name": f"{config.run.name}-unbroken", "run.stop_step": steps})
        try:
            train_unbroken(beside, folder, steps, say)
            unbroken = beside.run_dir
        except RunError as error:
            problems.append(str(error))
    say("reading every trained row again, to prove that none was lost or repeated")
    nodes = f"{request.nodes} nodes on this machine" if request.nodes is not None else "a cluster"
    made = [time.strftime("%Y-%m-%d", time.gmtime()), f"ray-ulysses {__version__}"]
    made += [*([] if options.note is None else [options.note]), f"{os.cpu_count()} CPU cores", nodes]
    sizes = f"{config.cluster.workers} workers, sp_size {config.parallel.sp_size}"
    return report_rehearsal(
        config.run_dir,
        planned=request.faults,
        injected=injected,
        unbroken=unbroken,
        tolerance=TOLERANCES[config.model.dtype],
        most=config.cluster.workers.max,
        min_ettr=None if options.min_ettr is None else options.min_ettr / 100.0,
        setting=[f"{', '.join(made)}: {sizes}. Command: `{shlex.join(['ray-ulysses', *sys.argv[1:]])}`."],
        problems=problems,
    )


def render_report(report: RehearsalReport) -> str:
    """Return the report as Markdown."""
    verdict = "everything holds" if report.holds else "DOES NOT HOLD"
    lines = [f"# Rehearsal {report.name}: {verdict}", "", *report.setting, ""]
    lines += [f"* {problem}" for problem in report.problems] + [""] * bool(report.problems)
    lines += _table(("", ""), _totals(report))
    if report.recoveries:
        lines += ["", "## What each fault cost", ""]
        lines += ["Seconds after the fault; the pause is from the last step before.", ""]
        lines += _table(_COLUMNS, [_row(one) for one in report.recoveries])
    if report.samples:
        from ray_ulysses.rehearsal.check import relative_difference

        lines += ["", "## Losses compared with the run without faults", ""]
        rows = [
            (str(step), f"{ours:.7f}", f"{theirs:.7f}", f"{relative_difference(ours, theirs):.1e}")
            for step, ours, theirs in report.samples
        ]
        lines += _table(("step", "with faults", "without", "relative difference"), rows)
    return as_text(lines)


def _totals(report: RehearsalReport) -> list[tuple[str, str]]:
    ettr = "-" if report.ettr is None else percent(report.ettr)
    rows = [
        ("steps", f"{report.steps:,} in {duration(report.seconds)}"),
        ("faults", str(len(report.recoveries))),
        ("rows lost", str(report.rows_lost)),
        ("rows repeated", str(report.rows_repeated)),
        ("rows trained", f"{report.rows:,}, read again from the corpus: digest {report.data_digest}"),
        ("steps lost", f"{report.lost_steps:,} (trained again)"),
        ("effective training time", f"{ettr} of the time was spent on steps that count"),
        ("loss of steps that were trained again", _difference(report.retrained, report.tolerance)),
    ]
    if report.unbroken is not None:
        rows.append(("loss compared with a run without faults", _difference(report.unbroken, report.tolerance)))
    return rows


def _difference(found: LossComparison, tolerance: float) -> str:
    if not found.steps:
        return "no such step"
    return f"differs by {found.largest:.1e} at most, in {found.steps:,} steps (rounding: up to {tolerance:.0e})"


def _row(one: Recovery) -> tuple[str, ...]:
    times = (one.detected_s, one.formed_s, one.loaded_s, one.first_step_s, one.pause_s)
    shown = ["" if seconds is None else f"{seconds:.1f} s" for seconds in times]
    workers = "" if None in one.workers else f"{one.workers[0]} -> {one.workers[1]}"
    lost = "" if one.lost_steps is None else str(one.lost_steps)
    what = one.injected.what
    if one.is_shared:
        what += ", in the same restart as above"
    return (minutes(one.injected.fault.at_s), one.injected.fault.kind, *shown, lost, workers, what)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [head, ["-" * max(3, width) for width in widths], *rows]
    return [
        "| " + " | ".join(f"{cell:<{max(3, width)}}" for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
