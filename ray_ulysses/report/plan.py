"""Renders the output of ``ray-ulysses plan``."""

from __future__ import annotations

from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.layout import HeadPlan
from ray_ulysses.planner.memory_terms import GIB, MemoryTerm
from ray_ulysses.planner.report import DataFacts, LayoutFacts, PlanReport, StageFacts
from ray_ulysses.planner.state_memory import PeerMemoryFacts
from ray_ulysses.planner.throughput import seconds_text
from ray_ulysses.report.words import as_text, count, duration, facts, percent, size, table

_PHASES = {
    "always": "",
    "passes": "in the passes",
    "loss": "in the loss",
    "layer": "in a layer",
    "mlp": "in its MLP",
    "attention": "in its attention",
    "update": "in the update",
    "load": "at the start",
}
_READERS = {"ray": "in tasks of Ray Data on the workers' nodes", "local": "in the workers"}
_MOST_SIZES = 8
_MOST_SETS = 3
_NO_TIME = "not predicted (needs cluster.device, GPUs, bf16 and no NVMe optimizer)"
_FLOPS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"))


def render_verdict(report: PlanReport, price: float | None = None) -> str:
    """Render a plan on one screen: problems and notes, the verdict in about ten lines, and the parts of a mixture.

    ``price`` is the price per GPU-hour, in any currency. None omits the cost.
    """
    return as_text([*_screen(report, price), "more: --verbose"])


def render_plan(report: PlanReport, price: float | None = None) -> str:
    """Render a plan's verdict, followed by every term of it. For ``price``, see `render_verdict`."""
    lines = [*_screen(report, price), "", *_model(report), ""]
    if report.stages:
        lines += ["stages", *_stages(report.stages), ""]
        lines += [f"the sections below describe the last stage, {report.stages[-1].name}", ""]
    lines += [*_layout(report), "", *_data(report), "", *_time(report, price), "", *_memory(report)]
    return as_text([*lines, "", *_peer_memory(report.peer_memory)])


def _screen(report: PlanReport, price: float | None) -> list[str]:
    lines = []
    if report.problems:
        many = len(report.problems)
        lines += [f"{many} problem{'s' * (many > 1)}:", *(f"- {problem}" for problem in report.problems), ""]
    for note in report.notes:
        lines += [f"note: {note}", ""]
    state = "can't start" if report.problems else "is ready to start"
    if report.corpus.is_made_up and not report.problems:
        state = "can start once it has a corpus"
    number = count(report.shape.num_parameters)
    lines += [f"run {report.name!r} ({number} parameters, {report.shape.model_type}) {state}"]
    return [*lines, *facts(_verdict(report, price)), *_mixture(report)]


def _verdict(report: PlanReport, price: float | None) -> list[tuple[str, str]]:
    layout, data, memory, time = report.layout, report.data, report.memory, report.step_time
    most = max(memory.device_bytes, *(one.device_bytes for one in report.stages), 0)
    of_device, of_host = (most, report.device_gib), (memory.host_bytes, report.host_gib)
    limits = [taken <= limit * GIB for taken, limit in (of_device, of_host) if limit is not None]
    unlimited = "no limit is set: " if report.has_gpu else ""
    fits = unlimited if not limits else "fits: " if all(limits) else "does not fit: "
    needs = f"{_amount(*of_device)} per {'GPU' if report.has_gpu else 'worker'}, {_amount(*of_host)} of host memory"
    last = " of the last stage" if report.stages else ""
    step = _NO_TIME if not time else f"{seconds_text(time.seconds)} per step{last}, MFU {time.mfu:.0%}, {time.basis}"
    valid = f"{_other_counts(layout)}, best {_balanced_counts(layout)}"
    rows = [
        ("memory", fits + needs),
        ("time", step),
        ("workers", f"{_workers(report)}; also {valid}"),
    ]
    if report.stages:
        rows.append(("stages", ", ".join(f"{one.name} ({one.row_tokens:,} tokens)" for one in report.stages)))
    tokens = f"up to {data.rows_per_step * data.row_tokens:,} tokens"
    if report.corpus.is_made_up:
        where = f"there is no corpus in {report.corpus.path}" if report.corpus.path else "data.path is not set"
        rows.append(("data", f"synthetic documents: {where}"))
        rows.append(("steps", f"of {data.rows_per_step} rows, {tokens}; the number depends on the corpus"))
    else:
        padding = percent(data.padding_tokens / max(1, data.tokens + data.padding_tokens))
        filled = f"{percent(data.fill)} full, {padding} padding"
        lost = f"; {data.lost_tokens:,} tokens lost" if data.lost_tokens else ""
        rows.append(
            ("data", f"{count(data.tokens)} tokens in {data.num_rows:,} rows of {data.row_tokens:,}, {filled}{lost}")
        )
        rows.append(
            ("steps", f"{data.num_steps:,} of {data.rows_per_step} rows, {tokens}; stops at {data.stop_step:,}")
        )
        if any(one.path for one in data.evaluation):
            sets = [f"{one.name} ({count(one.tokens)} tokens)" for one in data.evaluation]
            more = f" and {len(sets) - _MOST_SETS} more" if len(sets) > _MOST_SETS else ""
            rows.append(("evaluated on", ", ".join(sets[:_MOST_SETS]) + more))
    if report.source_format is not None:
        rows.append(("weights", f"{report.source_format}, dequantized while loading; exports are {report.dtype}"))
    if (bill := _bill(report, price)) is not None:
        rows.append(("run", bill))
    return rows


def _amount(taken: int, limit_gib: float | None) -> str:
    return size(taken) if limit_gib is None else f"{size(taken).removesuffix(' GiB')} of {limit_gib:g} GiB"


def _mixture(report: PlanReport) -> list[str]:
    """Return a table of the corpora of a mixture, by stage if there are stages."""
    of_stages = [(one.name, one.mixture) for one in report.stages] or [("", report.data.mixture)]
    if max(len(mixture) for _, mixture in of_stages) < 2:
        return []
    rows = [
        (
            stage,
            "all" if one.weight is None else f"{one.weight:g}",
            "-" if one.tokens is None else count(one.tokens),
            "-" if one.share is None else f"{one.share:.1%}",
            "-" if one.epochs is None else f"{one.epochs:.2f}",
            one.path,
        )
        for stage, mixture in of_stages
        for one in mixture
    ]
    header = ("stage", "weight", "tokens used", "share", "epochs", "source")
    first = 0 if report.stages else 1
    return table(header[first:], [row[first:] for row in rows])


def _model(report: PlanReport) -> list[str]:
    shape = report.shape
    exact = "" if shape.is_exact else " (an estimate)"
    tied = "tied" if shape.tied_embeddings else "untied"
    rows = [
        ("parameters", f"{count(shape.num_parameters)} ({shape.num_parameters:,}){exact}, {shape.model_type}"),
        ("layers", f"{shape.num_layers} of width {shape.hidden_size}, {_mlp(shape)}"),
        ("heads", f"{shape.num_heads} of {shape.head_dim}, {shape.num_kv_heads} key-value heads"),
        ("vocabulary", f"{shape.vocab_size:,}, {tied} embeddings"),
    ]
    if shape.part is not None:
        number, share = shape.trained_parameters, shape.trained_parameters / shape.num_parameters
        said = f"{count(number)} ({number:,}), {share:.2%} of all"
        said += f"; adapters have {count(shape.part.added)}" if shape.has_adapter else ""
        if shape.has_adapter and shape.experts is not None and not shape.part.summed:
            said += "; experts that share a tensor are frozen unless model.adapter.targets names them"
        rows.insert(1, ("trained", said))
    if shape.muon is not None:
        muon, others = shape.muon, shape.trained_parameters - shape.muon.parameters
        said = f"Muon trains {count(muon.parameters)} in {muon.matrices:,} matrices, AdamW trains {count(others)}"
        rows.append(("optimizer", said))
    for one in shape.matched:
        rows.append(("optimizer group", f"{', '.join(one.match)}: {count(one.parameters)} in {one.tensors:,} tensors"))
    return ["model", *facts(rows)]


def _mlp(shape: ModelShape) -> str:
    experts = shape.experts
    if experts is None:
        return f"MLP {shape.intermediate_size}"
    shared = f", and a shared one of {experts.shared}" if experts.shared else ""
    return f"{experts.active} of {experts.count} experts of {experts.width} per token{shared}"


def _layout(report: PlanReport) -> list[str]:
    layout = report.layout
    split = f"sp {layout.sp_size} = ulysses {layout.ulysses_size} x ring {layout.ring_size}"
    if layout.ring_size > 1 and layout.ring_is_chosen:
        split += f", chosen because {layout.sp_size} ranks can't share {layout.heads.num_heads} heads"
    rows = [
        ("workers", _workers(report)),
        ("row split", split),
        ("heads per rank", _heads(layout.heads)),
        ("other sp sizes", ", ".join(str(size) for size in layout.valid_sp_sizes)),
        ("other worker counts", _other_counts(layout)),
        ("balanced counts", _balanced_counts(layout)),
    ]
    return ["layout", *facts(rows)]


def _other_counts(layout: LayoutFacts) -> str:
    multiples = f"multiples of {layout.sp_size}" if layout.sp_size > 1 else "any number"
    return f"{multiples} up to {layout.largest_world_size}"


def _balanced_counts(layout: LayoutFacts) -> str:
    sizes = layout.level_world_sizes
    return ", ".join(map(str, sizes[:_MOST_SIZES])) + (", ..." if len(sizes) > _MOST_SIZES else "")


def _workers(report: PlanReport) -> str:
    layout, time = report.layout, report.step_time
    device = "" if time is None else f" {time.device}"
    workers = f"{layout.world_size}{device} = dp {layout.dp_size} x sp {layout.sp_size}"
    if layout.least_world_size == layout.world_size:
        return workers
    return f"{layout.least_world_size} to {workers}; memory is planned for {layout.least_world_size}"


def _stages(stages: tuple[StageFacts, ...]) -> list[str]:
    header = ("", "steps", "context", "rows", "tokens", "dp x sp", "lr", "schedule", "optimizer", "memory", "a step")
    rows = [
        (
            one.name,
            "-" if one.steps is None else "{:,} to {:,}".format(*one.steps),
            f"{one.row_tokens:,}",
            f"{one.rows_per_step:,}",
            "-" if one.tokens is None else count(one.tokens),
            f"{one.dp_size} x {one.sp_size}",
            f"{one.lr:g}",
            one.schedule,
            one.optimizer,
            size(one.device_bytes),
            "-" if one.step_seconds is None else duration(one.step_seconds),
        )
        for one in stages
    ]
    more = [(one.name, f"positions: {one.rope}; corpora: {', '.join(one.sources)}") for one in stages]
    return [*table(header, rows), *facts(more)]


def _heads(heads: HeadPlan) -> str:
    least = min(rank.num_heads for rank in heads.ranks)
    query = f"{heads.max_heads}" if least == heads.max_heads else f"{least} or {heads.max_heads}"
    said = f"{query} query, {heads.max_kv_heads} key-value"
    if heads.imbalance > 1:
        said += f"; uneven: the fullest rank has {heads.imbalance:.2f}x the mean, which slows attention by as much"
    if heads.kv_copies > 1:
        said += f"; each key-value head is sent {heads.kv_copies:g} times"
    if heads.kernel_calls > 1:
        said += f"; up to {heads.kernel_calls} kernel calls per layer, since head groups are split"
    return said


def _made_up_data(report: PlanReport) -> list[str]:
    corpus, data = report.corpus, report.data
    tokens = data.rows_per_step * data.row_tokens
    said = (
        f"no corpus is prepared in {corpus.path}: assuming {corpus.num_documents:,} synthetic documents of up to "
        f"{corpus.longest_document:,} tokens, which do not affect model, layout and memory"
    )
    rows = [
        ("rows", f"of up to {data.row_tokens:,} tokens (multiples of {data.pad_multiple})"),
        ("steps", f"of {data.rows_per_step} rows, up to {tokens:,} tokens; the number of steps depends on the corpus"),
        *_costs(data),
    ]
    return ["data", f"  {said}", *facts(rows)]


def _costs(data: DataFacts) -> list[tuple[str, str]]:
    return [
        ("dp imbalance", f"{data.imbalance:.3f}x the time of perfectly balanced ranks, at the configured dp"),
        ("  at other dp", ", ".join(f"{dp}: {ours:.2f}" for dp, ours, _ in data.imbalance_by_dp) or "-"),
        ("  least possible", ", ".join(f"{dp}: {least:.2f}" for dp, _, least in data.imbalance_by_dp) or "-"),
        ("step time spread", "{:.2f}x (fastest step) to {:.2f}x (slowest step) the mean".format(*data.step_spread)),
        ("work", f"{_flops(data.flops_per_step)} per step on average, causal attention, without recomputation"),
    ]


def _flops(number: float) -> str:
    unit, name = next(((unit, name) for unit, name in _FLOPS if number >= unit), _FLOPS[-1])
    return f"{number / unit:.3g} {name}"


def _data(report: PlanReport) -> list[str]:
    corpus, data = report.corpus, report.data
    if corpus.is_made_up:
        return _made_up_data(report)
    computed = data.tokens + data.padding_tokens
    padding = f"{data.padding_tokens:,} of {computed:,} computed tokens ({percent(data.padding_tokens / computed)})"
    lost = (
        f"{data.lost_tokens:,}: the ends of {data.truncated_documents:,} documents, and "
        f"{data.dropped_documents:,} whole documents (data.overlong)"
    )
    segment = f", segment {data.segment} of the run's data, from step {data.base_step:,} on"
    rows = [
        ("corpus", f"{corpus.num_documents:,} documents, {count(corpus.num_tokens)} tokens"),
        ("longest document", f"{corpus.longest_document:,} tokens; largest token id {corpus.max_token_id}"),
        ("rows", f"{data.num_rows:,} of up to {data.row_tokens:,} tokens (multiples of {data.pad_multiple})"),
        ("packing", f"{data.packing}; rows of {data.row_tokens:,} tokens are {percent(data.fill)} full"),
        ("padding", f"{padding}; rows are padded to a multiple of {data.pad_multiple}"),
        ("split documents", f"{data.split_documents:,} longer than a row; no target is lost"),
        ("lost tokens", lost if data.lost_tokens else "none"),
        ("steps", f"{data.num_steps:,} of {data.rows_per_step} rows; stops at step {data.stop_step:,}"),
        *_costs(data),
        ("rows are read", f"{_READERS[data.engine]} (data.engine={data.engine})"),
        ("plan", data.plan_id + (segment if data.segment else "")),
    ]
    if data.supervised < data.tokens * 0.5:
        rows.insert(
            5, ("supervised", f"{data.supervised:,} tokens have a label ({percent(data.supervised / data.tokens)})")
        )
    if corpus.loss_weights is not None:
        low, high = corpus.loss_weights
        rows.insert(2, ("loss weights", f"from {low:g} to {high:g}; a step's loss is the mean by weight"))
    for one in reversed(data.evaluation):
        documents = one.path or f"{data.held_out_documents:,} held-out documents"
        rows.insert(5, ("evaluation", f"{one.rows} rows, {one.tokens:,} tokens with a label, of {documents}"))
    if data.skipped_documents:
        rows.insert(5, ("skipped documents", f"{data.skipped_documents:,} with a single token"))
    if corpus.unigram_nats is not None:
        rows.insert(2, ("byte entropy", f"{corpus.unigram_nats:.3f} nats (unigram): a model should get below it"))
    return ["data", *facts(rows)]


def _time(report: PlanReport, price: float | None) -> list[str]:
    modelled, world = report.step_time, report.layout.world_size
    if modelled is None:
        return [f"time: {_NO_TIME}"]
    width = max(len(term.name) for term in modelled.terms)
    lines = [
        f"time per step: {seconds_text(modelled.seconds)} on {world} {modelled.device}, {modelled.basis}; "
        f"MFU {modelled.mfu:.0%}, HFU {modelled.hfu:.0%}",
        f"  figures of {modelled.device}: {modelled.source}",
    ]
    for term in modelled.terms:
        lines.append(_row(seconds_text(term.seconds), term.name, width, term.source))
    bill = _bill(report, price)
    return lines if bill is None else [*lines, f"  {bill}, without faults and saves"]


def _bill(report: PlanReport, price: float | None) -> str | None:
    """Return the remaining steps and their time and price, as far as these are known, or None if the time is not."""
    if report.step_time is None:
        return None
    world, of_stages = report.layout.world_size, _left(report)
    steps, total_s = sum(count for count, _ in of_stages), sum(count * seconds for count, seconds in of_stages)
    said = f"{steps:,} steps: {duration(total_s)}"
    if report.corpus.is_made_up:
        said, total_s = "one step", report.step_time.seconds
    hours = total_s / 3600 * world
    return f"{said}, {hours:,.1f} GPU-hours" + ("" if price is None else f", {hours * price:,.2f} at {price:g} each")


def _left(report: PlanReport) -> list[tuple[int, float]]:
    """Return (remaining steps until the run stops, modelled seconds per step) for each stage."""
    stop = report.data.stop_step
    if not report.stages:
        seconds = 0.0 if report.step_time is None else report.step_time.seconds
        return [(max(0, stop - report.data.base_step), seconds)]
    planned = [(stage.steps, stage.step_seconds) for stage in report.stages]
    return [
        (max(0, min(steps[1], stop) - steps[0] + 1), seconds)
        for steps, seconds in planned
        if steps is not None and seconds is not None
    ]


def _memory(report: PlanReport) -> list[str]:
    memory = report.memory
    limit = "" if report.device_gib is None else f"; the limit is {report.device_gib:g} GiB"
    width = max(len(_title(term)) for term in (*memory.device, *memory.host))
    return [
        f"memory per rank: {memory.note}",
        f"  device: {size(memory.device_bytes)} at its peak{limit}",
        *[_row(size(one.bytes), _title(one), width, one.source) for one in memory.device],
        f"  host: {size(memory.host_bytes)} at its peak",
        *[_row(size(one.bytes), _title(one), width, one.source) for one in memory.host],
        *[f"  chosen: {one}" for one in report.chosen],
    ]


def _peer_memory(kept: PeerMemoryFacts | None) -> list[str]:
    if kept is None:
        return ["peer memory: disabled (elastic.peer_memory); a failure loses the steps since the newest checkpoint"]
    limit = "a third of free memory" if kept.limit_gib is None else f"{kept.limit_gib:g} GiB (elastic.peer_memory_gib)"
    seconds = f"{kept.save_s:.1f} s" if kept.save_s >= 1 else "a second"
    rows = [
        ("memory per node", f"{size(kept.kept_bytes)} for each worker on the node; at most {limit} per node"),
        ("network", f"{size(kept.sent_bytes)} per worker for each copy, to the partner node"),
        ("frequency", f"after each step longer than about {seconds} (at 1 GiB/s per worker), otherwise less often"),
        ("cost of a lost node", "one or two steps; a single node can only recover lost processes"),
    ]
    return ["peer memory: a copy of the newest state on each worker's node and on a partner node", *facts(rows)]


def _title(term: MemoryTerm) -> str:
    return f"{term.name} ({_PHASES[term.phase]})" if _PHASES[term.phase] else term.name


def _row(value: str, name: str, width: int, source: str) -> str:
    return f"  {value:>10}  {name:<{width}}  {source}"
