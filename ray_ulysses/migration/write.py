"""Writes our configuration from the facts of other tools' files, with a comment beside each line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ray_ulysses.config import parse_config
from ray_ulysses.config.yaml_text import dump_yaml, parse_yaml
from ray_ulysses.errors import NOT_GIVEN, ConfigError, shown
from ray_ulysses.logging import one_line
from ray_ulysses.migration.facts import Fact, Facts, read_facts

_ADAMW = re.compile(
    r"(?:fused|cpu|deepspeedcpu)?adam|(?:paged_)?adamw(?:_32bit|_hf|(?:_torch|_apex)?(?:_npu)?(?:_fused|_xla)?)?"
)
_SMALL_ADAMW = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit")
_DTYPES = {
    **dict.fromkeys(("true", "bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("none", "false", "no", "fp32", "float32"), "fp32"),
}
_LORA, _FULL = ("lora", "qlora", "true"), ("full", "none", "false", "")
_SCHEDULES = {
    **dict.fromkeys(("linear", "warmupdecaylr"), "linear"),
    **dict.fromkeys(("cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmupcosinelr"), "cosine"),
    **dict.fromkeys(("constant", "constant_with_warmup", "warmuplr"), "constant"),
    **dict.fromkeys(("warmup_stable_decay", "wsd"), "wsd"),
}
_OVERLONG = {
    **dict.fromkeys(("keep_start", "right", "truncate"), "truncate"),
    **dict.fromkeys(("delete", "drop"), "drop"),
    **dict.fromkeys(("raise", "error"), "error"),
    "split": "split",
}
_PACKING = {"bfd": "best_fit", "bfd_split": "best_fit", "binpack": "best_fit", "wrapped": "concat"}
_PACKING |= {"sequential": "best_fit", "true": "best_fit", "none": "none", "false": "none", "concat": "concat"}
_FIELDS = ("text_field", "messages_field", "tools_field", "prompt_field", "completion_field", "chat_template")
_ROWS = {
    "alpaca": {"prompt_field": "instruction", "input_field": "input", "completion_field": "output"},
    "chat_template": {"messages_field": "messages"},
    "sharegpt": {"messages_field": "conversations"},
    "completion": {"text_field": "text"},
}
_PREPARE_READS = "`prepare` reads the data: see its options for the kind of the rows, the fields and the chat template"
# Options of one of Axolotl's evaluation sets, which stay together.
_OF_SET = {"split": "split", "field": "text_field", "field_messages": "messages_field", "field_tools": "tools_field"}
_TRACKERS = ("mlflow", "wandb", "tensorboard")


def convert(paths: Sequence[Path], given: Mapping[str, object]) -> str:
    """Return our configuration, as YAML, for files of other tools.

    Args:
        paths: The files. If several state the same fact, the first one decides.
        given: Values of the command's options by their names, which precede the files.

    Raises:
        ConfigError: Options have values that can't be trained exactly, or a required value is missing. All problems
            are listed.
        UserError: A file can't be read, or belongs to no known tool.
    """
    options = {"--model": "model", "--context": "context", "--gpus": "world"}
    stated = {options[name]: Fact(value=value, option=name, tool="") for name, value in given.items()}
    facts = read_facts(paths, stated)
    writer = _Writer(facts)
    for part in (_run, _model, _data, _optimizer, _schedule, _memory, _checkpoint, _tracking, _cluster):
        part(writer)
    source = ", ".join(map(str, paths))
    if facts.problems:
        raise ConfigError(facts.problems, source)
    text = writer.text(source)
    # The sections must also agree with each other, such as sp_size with the number of workers.
    parse_config(parse_yaml(text, source)[0])
    return text


class _Writer:
    """Collects lines by section."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.sections: dict[str, list[str]] = {}

    def put(self, path: str, value: object, *names: str, why: str = "", note: str = "") -> None:
        """Add a setting.

        Args:
            path: Dotted path of the setting.
            value: Its value.
            names: The facts from which it comes.
            why: The reason why it differs, or for a setting without facts, the whole comment.
            note: A remark beside a value that does not differ.
        """
        stated = {name: fact for name in names if (fact := self.facts.fact(name)) is not None}
        self.facts.used |= stated.keys()
        own = [str(fact) for fact in stated.values() if fact.option] or [str(fact) for fact in stated.values()][:1]
        options = [fact.option for fact in stated.values() if fact.option]
        if not own or why.startswith("edit"):
            comment, note = why or note, f"from {', '.join(options)}" if options else ""
        elif why:
            comment = f"changed from {', '.join(own)}: {why}"
        else:
            comment = f"carried over from {', '.join(options)}" if options else own[0]
        comment += f" ({note})" if note else ""
        section, _, rest = path.partition(".")
        *holders, name = rest.split(".")
        lines = self.sections.setdefault(section, [])
        if holders and f"  {holders[0]}:" not in lines:
            lines.append(f"  {holders[0]}:")
        shown = dump_yaml({name: value}).rstrip() if isinstance(value, str) else f"{name}: {json.dumps(value)}"
        lines.append(f"{'  ' * (len(holders) + 1)}{shown}  # {one_line(comment)}")

    def carry(self, path: str, name: str, *, whole: bool = False) -> None:
        """Add a setting with a fact's number, if it is stated."""
        value = self.facts.whole(name) if whole else self.facts.number(name)
        if value is not None:
            self.put(path, value, name)

    def need(self, name: str, option: str, what: str) -> bool:
        """Return whether a fact is stated. If not, record the missing option as a problem."""
        if self.facts.fact(name) is None:
            tools = " and ".join(dict.fromkeys(self.facts.tools))
            missing = Fact(value=NOT_GIVEN, option=option, tool="")
            self.facts.refuse(
                missing, f"must be given: the {tools} configuration does not state {what}", "pass it to init"
            )
        return self.facts.fact(name) is not None

    def choice(self, name: str, choices: Mapping[str, str], rule: str, hint: str) -> str | None:
        """Return the setting for a fact's value, or None if nothing is stated. Another value is a problem."""
        fact = self.facts.fact(name)
        if fact is None:
            return None
        found = choices.get(str(fact.value).lower())
        if found is None:
            self.facts.refuse(fact, rule, hint)
        return found

    def text(self, source: str) -> str:
        """Return the file: the settings, then the options that are left out."""
        tools = " and ".join(dict.fromkeys(self.facts.tools))
        lines = [
            f"# Converted from {one_line(source)} ({tools}) by `ray-ulysses init --from`.",
            "# Edit the lines that are marked with `edit`, then: ray-ulysses plan FILE",
        ]
        for name, own in self.sections.items():
            lines += ["", f"{name}:", *own]
        self.facts.leave_unused()
        left_out = [one_line(f"{'; '.join(options)}: {why}") for why, options in self.facts.left_out.items()]
        lines += ["", "# Left out:", *(f"# - {one}" for one in left_out)] if left_out else []
        return "\n".join(lines) + "\n"


def _run(w: _Writer) -> None:
    f = w.facts
    output = (f.text("output_dir") or "").rstrip("/")
    folder, _, stem = output.rpartition("/")
    if (named := f.text("run_name")) is not None:
        folder = output
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", named or stem or f.source).strip("-._")[:128] or "converted"
    rule = "" if name == (named or stem) else "a name has letters, digits, '.', '_' and '-'"
    of = ("run_name",) if named else ("output_dir",) if stem else ()
    w.put("run.name", name, *of, why=rule if of else "edit: its directory is STORAGE/NAME")
    w.put(
        "run.storage",
        folder or "runs",
        *(["output_dir"] if output else []),
        why="edit: a directory that every node can access",
    )
    w.carry("run.seed", "seed", whole=True)
    steps = f.whole("max_steps") or 0
    if steps > 0:
        w.put("run.stop_step", steps, "max_steps")
    if (every := f.number("log_steps")) is not None:
        w.put("run.log_every_steps", max(1, int(every)), "log_steps", why="steps, not a fraction" if every < 1 else "")
    fraction = f.number("eval_fraction") or 0.0
    wants = str(f.value("eval_strategy") or "steps").lower() != "no"
    if (fraction > 0 or f.flag("validation")) and wants:
        every = f.number("eval_steps") or f.number("save_steps") or 100
        is_steps = every >= 1 and f.text("eval_strategy") != "epoch"
        why = "" if is_steps and f.fact("eval_steps") else "evaluations are counted in steps"
        w.put("run.eval_every_steps", int(every) if is_steps else 100, "eval_steps", "eval_strategy", why=why)
        patience = f.whole("patience") or 0
        if patience > 0:
            why = "" if is_steps else "counted in evaluations, here every 100 steps"
            w.put("run.early_stopping.patience", patience, "patience", why=why)


def _model(w: _Writer) -> None:
    f = w.facts
    if w.need("model", "--model", "the model"):
        w.put("model.path", f.text("model"), "model")
    if f.flag("from_scratch") and not f.flag("pretrained"):
        w.put("model.init", "random", "from_scratch", "pretrained")
    _precision(w)
    kind = w.choice(
        "adapter",
        {**dict.fromkeys(_LORA, "lora"), **dict.fromkeys(_FULL, "full")},
        "the only supported adapter is LoRA, here also DoRA",
        "use lora, or full and, to freeze some weights, model.freeze in the converted file",
    )
    if kind == "full" and f.fact("adapter") is not None:
        f.leave("adapter", "all weights are trained, as without model.adapter")
    if kind is not None or f.fact("adapter") is None:
        _quantized_base(w, kind)
    if kind != "lora":
        if prefixes := _names(f.value("freeze")):
            w.put("model.freeze", [f"{one}*" for one in prefixes], "freeze", note="patterns of names")
        return
    w.put("model.adapter.rank", f.whole("lora_rank") or 8, "adapter", "lora_rank")
    alpha = f.whole("lora_alpha")
    w.put(
        "model.adapter.alpha", alpha or 2 * (f.whole("lora_rank") or 8), "lora_alpha", why="" if alpha else "2 x rank"
    )
    if f.flag("rslora"):
        w.put("model.adapter.rslora", True, "rslora")
    if f.flag("dora"):
        w.put("model.adapter.dora", True, "dora")
    _targets(w)
    for name, setting in (("lora_ranks", "ranks"), ("lora_alphas", "alphas")):
        _pattern(w, name, setting)
    adapters = _names(f.value("adapter_from"))
    if (fact := f.fact("adapter_from")) is not None and len(adapters) > 1:
        f.refuse(fact, "training continues from a single adapter", "merge the others into the model, and name the last")
    elif adapters:
        w.put("model.adapter.from", adapters[0], "adapter_from")
    if modules := _names(f.value("lora_modules")):
        w.put("model.adapter.modules_to_save", modules, "lora_modules")
    if f.flag("lora_dropout"):
        f.leave("lora_dropout", "adapters have no dropout here, since its masks would depend on the layout")


def _quantized_base(w: _Writer, adapter: str | None) -> None:
    f = w.facts
    names: tuple[str, ...] = ("quant_bits", "four_bit", "eight_bit")
    bits = f.whole("quant_bits") or (4 if f.flag("four_bit") else 8 if f.flag("eight_bit") else 0)
    fact = next((f.fact(name) for name in names if f.flag(name)), None)
    if str(f.value("adapter")).lower() == "qlora" and fact is None:
        bits, names, fact = 4, ("adapter",), f.fact("adapter")
    if fact is None:
        return
    base_dtype = {4: "nf4", 8: "int8"}.get(bits)
    if adapter != "lora":
        f.refuse(fact, "a quantized base is frozen, so only adapters can be trained", "use lora, or remove it")
    elif base_dtype is None:
        f.refuse(fact, "model.base_dtype has types of 4 bits (nf4) and 8 bits (int8)", "use 4 or 8")
    else:
        why = "" if bits == 4 else "each row has one scale, and activations are not quantized"
        w.put("model.base_dtype", base_dtype, *names, why=why)


def _targets(w: _Writer) -> None:
    """Add the adapted layers. Parameters of experts are listed with them."""
    f = w.facts
    targets, parameters = _names(f.value("lora_targets")), _names(f.value("lora_parameters"))
    is_all = f.flag("lora_all_linear") or bool({"all", "all-linear", "all_linear"} & set(targets))
    fact = f.fact("lora_parameters")
    if fact is not None and is_all and parameters:
        f.refuse(fact, "model.adapter.targets can't list all linear layers and experts together", "list the layers too")
    elif parameters or (targets and not is_all):
        w.put("model.adapter.targets", [*targets, *parameters], "lora_targets", "lora_parameters")
    else:
        why = "" if is_all else "edit: PEFT would choose them by model type"
        w.put("model.adapter.targets", "all-linear", "lora_targets", "lora_all_linear", why=why)


def _pattern(w: _Writer, name: str, setting: str) -> None:
    """Add ranks or alphas of single layers. PEFT's keys are regular expressions for the ends of names."""
    fact = w.facts.fact(name)
    if fact is None or not fact.value:
        return
    if isinstance(fact.value, dict) and all(re.fullmatch(r"[\w.]+", str(key)) for key in fact.value):
        w.put(f"model.adapter.{setting}", fact.value, name)
    else:
        w.facts.refuse(fact, "must be a mapping of names; regular expressions are not supported", "list each layer")


def _names(value: object) -> list[str]:
    """Return the names in a list, or in text separated by commas."""
    given = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return [str(name).strip() for name in given if name]


def _precision(w: _Writer) -> None:
    """Add the data type of the computation: a stated one, or else the default of the first tool that has one."""
    f = w.facts
    found = [name for name in ("fp32", "precision", "bf16") if f.fact(name) is not None]
    stated = [name for name in found if (fact := f.fact(name)) is not None and fact.option]
    name = next(iter(stated or found), "bf16")
    value, fact = str(f.value(name)).lower(), f.fact(name)
    dtype = {"fp32": {"true": "fp32"}, "bf16": {"auto": "bf16"}}.get(name, {}).get(value) or _DTYPES.get(value)
    if dtype is None:
        assert fact is not None
        f.refuse(fact, "only bf16 (with fp32 master weights) and fp32 exist", "use bf16, which needs no loss scaling")
    w.put("model.dtype", dtype or "bf16", name, why="" if fact else "no lower precision is set")


def _sources(given: object) -> list[str]:
    return [part for one in (given if isinstance(given, list) else [given]) if one for part in str(one).split(",")]


def _validation(facts: Facts, fields: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield each evaluation source with its options of ``prepare``: those of the training data, or its own."""
    given = facts.value("validation")
    for one in given if isinstance(given, list) else [given]:
        if not isinstance(one, Mapping):
            yield from ((source, fields) for source in _sources(one))
        elif "path" in one:
            rows = _ROWS.get(str(one.get("type")))
            own = {name: one[option] for option, name in _OF_SET.items() if one.get(option) is not None}
            yield str(one["path"]), {**(fields if rows is None else rows), **own}
            known = {"path", *_OF_SET, *(["type"] if rows is not None else [])}
            rest = [f"test_datasets.{option}: {shown(one[option])}" for option in one if option not in known]
            if rest:
                facts.left_out.setdefault(_PREPARE_READS, []).extend(rest)


def _data(w: _Writer) -> None:
    f = w.facts
    sources, tokenizer = _sources(f.value("dataset")), f.text("model") or "MODEL"
    stated = {name: f.text(name) for name in _FIELDS if (fact := f.fact(name)) is not None and fact.option}
    fields = _ROWS.get(str(f.value("dataset_type")), {}) | stated
    w.put("data.path", "corpus", why="edit: a directory that every node can access; `train` prepares the corpus there")
    w.put("data.prepare.sources", sources or ["SOURCES"], "dataset", why="" if sources else "edit: the raw data")
    w.put("data.prepare.tokenizer", tokenizer, "model")
    for name, value in fields.items():
        w.put(f"data.prepare.{name}", value, name, "dataset_type")
    if f.fact("dataset_split") is not None:
        w.put("data.prepare.split", f.text("dataset_split"), "dataset_split")
    # Each has a loss of its own.
    outs, commands = [], []
    for number, (source, own) in enumerate(_validation(f, fields), 1):
        outs.append(f"validation-{number}")
        options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in own.items())
        commands.append(f"ray-ulysses prepare {source} --tokenizer {tokenizer} --out {outs[-1]}{options}")
    if outs:
        w.put("data.validation", outs, "validation", why=f"edit: {' && '.join(commands)}")
    if w.need("context", "--context", "the length of a row"):
        w.put("data.context_tokens", f.whole("context"), "context")
    _batch(w)
    wrong = ("is not a supported kind of packing", "use bfd or wrapped")
    packing = w.choice("packing", _PACKING, *wrong)
    strategy = w.choice("packing_strategy", _PACKING, *wrong) if packing == "best_fit" else None
    if packing is not None:
        why = "documents are fitted into 64 open rows" if f.text("packing_strategy") == "sequential" else ""
        note = "each document has a row of its own, as in a padded batch" if packing == "none" else ""
        w.put("data.packing", strategy or packing, "packing", "packing_strategy", why=why, note=note)
    rule = "a long document is cut off at its end, split, dropped or refused"
    overlong = w.choice("overlong", _OVERLONG, rule, "use truncation at the end, drop or split")
    if overlong is not None:
        w.put("data.overlong", overlong, "overlong")
    epochs = f.number("epochs")
    if (f.whole("max_steps") or 0) > 0:
        w.put("data.epochs", max(1, f.whole("epochs") or 1), "epochs", why="edit: enough epochs for run.stop_step")
    elif epochs is not None:
        why = "" if epochs == int(epochs) else "whole epochs; end earlier with run.stop_step"
        w.put("data.epochs", max(1, math.ceil(epochs)), "epochs", why=why)
    fraction = f.number("eval_fraction") or 0.0
    if fraction > 0:
        why = "" if fraction <= 0.5 else "edit: a fraction of the documents, not a number of them"
        w.put("data.eval_fraction", fraction if fraction <= 0.5 else 0.01, "eval_fraction", why=why)


def _batch(w: _Writer) -> None:
    """Add the rows of a step: the batch of all data-parallel ranks, over all micro-batches."""
    f = w.facts
    if not w.need("world", "--gpus", "the number of GPUs"):
        return
    world = max(1, f.whole("world") or 1)
    shared = [name for name in ("sp", "tp", "pp") if (f.whole(name) or 1) > 1]
    ranks = math.prod(f.whole(name) or 1 for name in shared)
    if world % ranks:
        fact = f.fact("world")
        assert fact is not None
        f.refuse(fact, f"is not a multiple of {ranks}, the GPUs that share a row", f"use a multiple of {ranks}")
        return
    groups, whole = world // ranks, f.whole("global_batch") or 0
    micro, accumulation = f.whole("micro_batch") or 1, f.whole("accumulation")
    if whole > 0:
        w.put("data.rows_per_step", whole, "global_batch")
        f.used |= {"micro_batch", "accumulation"}
    elif accumulation is None and (least := f.whole("least_batch")) is not None:
        accumulation = max(1, math.ceil(least / micro / world))
        rows = micro * accumulation * groups
        w.put("data.rows_per_step", rows, "micro_batch", "least_batch", note=f"at least {least} rows")
    else:
        names = ("micro_batch", "accumulation", "world", *shared)
        rows = micro * (accumulation or 1) * groups
        w.put("data.rows_per_step", rows, *names, note=f"{micro} x {accumulation or 1} x {groups} data-parallel ranks")
    sp = f.whole("sp") or 1
    if sp > 1:
        w.put("parallel.sp_size", sp, "sp")
    for name in ("tp", "pp"):
        if name in shared:
            f.leave(name, "ZeRO-3 shards the weights instead, with the same result; parallel.sp_size divides rows")


def _optimizer(w: _Writer) -> None:
    f = w.facts
    name = (f.text("optimizer") or "adamw").lower()
    fact = f.fact("optimizer")
    if f.flag("use_muon"):
        w.put("optimizer.kind", "muon", "use_muon")
    if fact is not None and "muon" in name:
        hint = "set optimizer.kind: muon in the converted file, with a rate for AdamW"
        f.refuse(fact, "updates of Muon are scaled to the size of AdamW's here, so the rate has another meaning", hint)
    elif fact is not None and not _ADAMW.fullmatch(name) and name not in _SMALL_ADAMW:
        rule = "the optimizers are AdamW and Muon, since their state can be re-sharded exactly"
        f.refuse(fact, rule, "use adamw_torch")
    elif fact is not None and name in _SMALL_ADAMW:
        why = "AdamW keeps its moments in fp32 here, with optimizer.kind: adamw_bf16_moments in bf16"
        f.leave("optimizer", f"{why}; memory.offload_optimizer moves them off the GPU")
    lr, full = f.fact("lr"), f.number("full_lr")
    if full is not None and lr is not None and not lr.option and "  adapter:" not in w.sections["model"]:
        f.stated["lr"] = replace(lr, value=full)
    rate = f.number("lr") or 2e-5
    of = ["lr", *(["optimizer"] if _ADAMW.fullmatch(name) else [])]
    w.put("optimizer.lr", rate, *of, why="" if lr is not None else "edit: the files state no learning rate")
    betas = f.value("betas")
    if isinstance(betas, list) and len(betas) == 2:
        w.put("optimizer.betas", betas, "betas")
    elif f.fact("beta1") is not None or f.fact("beta2") is not None:
        pair = [f.number(name) or usual for name, usual in (("beta1", 0.9), ("beta2", 0.999))]
        w.put("optimizer.betas", pair, "beta1", "beta2")
    w.carry("optimizer.eps", "eps")
    w.carry("optimizer.weight_decay", "weight_decay")
    if (norm := f.number("max_grad_norm")) is not None:
        w.put("optimizer.max_grad_norm", norm if norm > 0 else None, "max_grad_norm")
    w.carry("optimizer.router_loss", "router_loss")


def _schedule(w: _Writer) -> None:
    f = w.facts
    hint = "use linear, cosine, constant or warmup_stable_decay"
    kind = w.choice("schedule", _SCHEDULES, "is not a supported schedule", hint) or "constant"
    steps = max(f.whole("horizon") or f.whole("max_steps") or 0, 0)
    warmup = _warmup(w, steps)
    ratio, shape = f.number("decay_ratio"), f.text("decay_shape")
    decay = round(ratio * steps) if ratio else f.whole("decay_steps")
    if decay and kind == "cosine":
        fact = f.fact("decay_ratio") or f.fact("decay_steps")
        assert fact is not None
        f.refuse(fact, "a cosine decay starts at the end of the warm-up", "use a linear decay, or remove it")
    linear = kind == "linear" or (kind == "wsd" and bool(decay) and shape == "linear")
    names, ends = ("schedule", "decay_ratio", "decay_steps", "decay_shape"), ("horizon", "max_steps")
    if linear and steps and f.flag("exact_rates"):
        # The other tools count steps from 0, so the same curve ends one step later.
        w.put("schedule.kind", "wsd", *names, note="with the next two lines the same linear decay, step by step")
        w.put("schedule.horizon_steps", steps + 1, *ends, note="one more, since steps are counted from 0 there")
        w.put("schedule.decay_steps", decay or max(1, steps - warmup), *ends, note="the steps of the decay")
    else:
        late = "rates come one step earlier than there, where steps are counted from 0"
        why = "" if kind == "constant" else f"the decay is linear, and {late}" if kind == "wsd" else late
        w.put("schedule.kind", kind, *names, why=why, note="" if f.fact("schedule") else "no schedule is set")
        if steps and kind != "constant":
            w.put("schedule.horizon_steps", steps, *ends)
        if kind == "wsd" and decay:
            w.put("schedule.decay_steps", decay, "decay_steps")
    lr, least = f.number("lr") or 1.0, f.number("min_lr")
    if kind != "constant":
        floor = f.number("min_lr_ratio") or 0.0 if least is None else least / lr
        why = "" if f.fact("min_lr") or f.fact("min_lr_ratio") else "the rate ends at 0 there"
        w.put("schedule.min_lr_ratio", floor, "min_lr", "min_lr_ratio", why=why)


def _warmup(w: _Writer, steps: int) -> int:
    """Add the warm-up, and return its steps, as far as they are known."""
    f = w.facts
    warmup, ratio = f.number("warmup_steps") or 0.0, f.number("warmup_ratio") or 0.0
    ratio, warmup = (warmup, 0.0) if 0 < warmup < 1 else (0.0 if warmup else ratio, warmup)
    if f.text("schedule") == "constant":
        ratio = warmup = 0.0
    why = "rates come one step earlier than there, where the first rate is 0"
    if ratio and not steps:
        w.put("schedule.warmup_ratio", ratio, "warmup_ratio", "warmup_steps", why=why)
        return 0
    known = math.ceil(ratio * steps) if ratio else int(warmup)
    why = "" if not known or f.flag("exact_warmup") else why
    if steps and known >= steps:
        known, why = steps - 1, "the run has no more steps"
    w.put("schedule.warmup_steps", known, "warmup_steps", "warmup_ratio", why=why, note="" if known else "none")
    return known


def _memory(w: _Writer) -> None:
    f = w.facts
    offloads = f.flag("offload_activations") or str(f.value("checkpointing")).startswith("offload")
    if f.fact("checkpointing") is not None or offloads:
        on = f.flag("checkpointing")
        why = "layer inputs are offloaded, and everything else is recomputed" if offloads and not on else ""
        w.put("memory.gradient_checkpointing", on or offloads, "checkpointing", why=why)
    if offloads:
        w.put("memory.offload_activations", ["layer_inputs"], "offload_activations", "checkpointing")
    stage = f.whole("zero_stage")
    weights = (f.text("offload_param") or "none").lower()
    if stage is not None:
        why = "" if stage else "stage 1 shards only the optimizer state"
        w.put("memory.zero_stage", stage or 1, "zero_stage", why=why)
    states = str(f.value("offload_optimizer") or "none").lower()
    states = {"true": "cpu", "false": "none"}.get(states, states)
    if weights not in ("none", "false"):
        why = "" if weights in ("cpu", "true") else "weights are kept in host memory, not in files"
        w.put(
            "memory.offload_optimizer", "cpu", "offload_optimizer", why="" if states == "cpu" else "as for the weights"
        )
        w.put("memory.offload_param", "cpu", "offload_param", why=why)
    elif states in ("cpu", "nvme"):
        w.put("memory.offload_optimizer", states, "offload_optimizer")
        if states == "nvme":
            w.put("memory.nvme_path", f.text("nvme_path") or "/local_nvme", "nvme_path", why="edit: on each node")


def _checkpoint(w: _Writer) -> None:
    f = w.facts
    every, kind = f.number("save_steps"), str(f.value("save_strategy") or "steps").lower()
    if kind == "no":
        w.put("checkpoint.every_steps", None, "save_strategy", why="a checkpoint is still saved at the end")
    elif kind != "steps" or (every is not None and every < 1):
        w.put("checkpoint.every_steps", 100, "save_strategy", "save_steps", why="checkpoints are counted in steps")
    elif every is not None:
        w.put("checkpoint.every_steps", int(every), "save_steps", "save_strategy")
    if (limit := f.whole("save_limit")) is not None:
        w.put("checkpoint.keep_last", max(1, limit), "save_limit")
    if f.flag("keep_best") and "run" in w.sections and any("eval_every" in line for line in w.sections["run"]):
        w.put("checkpoint.keep_best", 1, "keep_best", why="the best is kept, and `export` selects it with --step best")


def _tracking(w: _Writer) -> None:
    f = w.facts
    given = f.value("trackers")
    names = [str(one).lower() for one in (given if isinstance(given, list) else [given]) if one]
    has_project = (fact := f.fact("experiment")) is not None and fact.option == "wandb_project" and bool(fact.value)
    names += [name for name in _TRACKERS if f.flag(f"use_{name}") and name not in names]
    names += ["wandb"] if has_project and "wandb" not in names else []
    known = list(_TRACKERS) if names == ["all"] else [name for name in names if name in _TRACKERS]
    others = [name for name in names if name not in (*_TRACKERS, "none", "all")]
    of = ("trackers", *(f"use_{name}" for name in _TRACKERS), *(["experiment"] if has_project else []))
    w.put(
        "tracking.enabled",
        bool(known),
        *of,
        note="" if known else "edit: true for MLflow",
        why=f"no tracker for {', '.join(others)}" if others else "",
    )
    if known:
        w.put("tracking.trackers", known, *of)
        if f.text("experiment"):
            w.put("tracking.experiment", f.text("experiment"), "experiment")
        if "mlflow" in known and f.text("mlflow_uri"):
            w.put("tracking.uri", f.text("mlflow_uri"), "mlflow_uri")


def _cluster(w: _Writer) -> None:
    if (world := w.facts.whole("world")) is not None:
        w.put("cluster.workers", max(1, world), "world")
        has_gpus = world > 0 and not w.facts.flag("cpu")
        w.put("cluster.gpus_per_worker", int(has_gpus), "cpu", note="one worker per GPU" if has_gpus else "CPU")
