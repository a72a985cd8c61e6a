"""Runs an export, from choosing the checkpoint to publishing the directory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ray_ulysses.checkpoint.manifest import Manifest
from ray_ulysses.clock import SystemClock
from ray_ulysses.config import Config
from ray_ulysses.config.job_paths import refuse_relative_in_job
from ray_ulysses.engine.model_config import source_format
from ray_ulysses.engine.text_part import auto_class
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.adapters import AdapterExport, adapter_export, base_state, merged_decoder
from ray_ulysses.export.architecture import Architecture, describe
from ray_ulysses.export.average import AverageReader, averaged_checkpoints
from ray_ulysses.export.card import CARD_FILE, model_card, training_facts
from ray_ulysses.export.check import check_export, refuse_small_memory, take_sample
from ray_ulysses.export.decoder_merge import DecoderMerge, plan_merge, refuse_options
from ray_ulysses.export.directory import (
    RECORD_FILE,
    Identity,
    Record,
    already_exported,
    refuse_place,
    staging_folder,
    unpublished,
    upload,
)
from ray_ulysses.export.files import INDEX_FILE, CopiedFile, WeightFile, index_json, lay_out, write_files
from ray_ulysses.export.frozen_base import open_checkpoint, weight_reader
from ray_ulysses.export.report import AdapterFacts, CheckResult, ExportReport, ExportRequest, decimal_size
from ray_ulysses.export.sentences import sentence_files
from ray_ulysses.export.stream import WeightReader
from ray_ulysses.export.tensors import DTYPES, Stored, published_tensors, stored_tensors
from ray_ulysses.export.tokenizer_files import TokenizerFiles, find_tokenizer
from ray_ulysses.run.checkpoint_store import checkpoint_location, storage_answers
from ray_ulysses.run_names import EXPORT_FOLDER, manifest_key, step_folder
from ray_ulysses.storage import LocalStore, Store
from ray_ulysses.storage.place import Place, node_folder

_UNCHANGED = "the multimodal checkpoint's own"
_Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Export:
    """A complete export plan, made before the first byte is written."""

    request: ExportRequest
    config: Config
    manifests: tuple[Manifest, ...]
    """The checkpoint, or all averaged checkpoints in order of their steps."""
    out: Path
    architecture: Architecture
    tokenizer: TokenizerFiles
    stored: dict[str, Stored]
    files: tuple[WeightFile, ...]
    published: Place
    identity: Identity
    merge: DecoderMerge | None
    adapter: AdapterExport | None

    @property
    def manifest(self) -> Manifest:
        """The newest checkpoint, whose step names the export."""
        return self.manifests[-1]

    @property
    def is_adapter(self) -> bool:
        """Whether the export is an adapter without its base model."""
        return self.adapter is not None and not self.request.merge

    @property
    def all_files(self) -> Sequence[WeightFile | CopiedFile]:
        """The weight files, or all files of the multimodal checkpoint."""
        return self.files if self.merge is None else self.merge.files


def export_run(request: ExportRequest, log: _Log) -> ExportReport:
    """Export a run's committed checkpoint as a Hugging Face model directory.

    Returns:
        A report about the published directory.

    Raises:
        UserError: An option can't be satisfied.
        RunError: The checkpoint is damaged, its storage does not respond, the disk is full, or the check fails. Nothing
            is published.
    """
    if isinstance(place := request.out or request.run_dir, Path):
        refuse_relative_in_job("--out", place)
    config, store, manifest = open_checkpoint(request.run_dir, request.step, trust_run=request.trust_run)
    clock = SystemClock()
    started = clock.monotonic()
    export = _prepare(store, manifest, config, request)
    place = export.published
    if (record := already_exported(place, export.identity, overwrite=request.overwrite)) is not None:
        # The record contains neither the directory's path nor the tokenizer's.
        return replace(record.report, out=str(place), tokenizer=export.tokenizer.words, was_there=True)
    if request.check:
        trained = sum(tensor.num_elements for file in export.all_files for tensor in file.tensors)
        if export.adapter is not None:
            trained = sum(torch.Size(place.shape).numel() for place in export.adapter.live.values())
        refuse_small_memory(export.merge.num_elements if export.merge else trained)
    one_checkpoint = len(export.manifests) == 1
    weights = weight_reader(config, store, manifest) if one_checkpoint else AverageReader(store, export.manifests)
    small = _small_files(export)
    num_bytes = sum(file.num_bytes for file in export.all_files) + sum(map(len, small.values()))
    with unpublished(export.out, num_bytes) as folder:
        for name, content in small.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        if export.merge is not None and export.merge.left_out:
            log(f"not copied from {export.merge.directory}: {', '.join(export.merge.left_out)}")
        write_files(folder, export.all_files, weights, lambda file: log(f"{file.name}: {decimal_size(file.num_bytes)}"))
        check = _check(export, folder, weights, log) if request.check else None
        report = _report(export, check, {name: len(content) for name, content in small.items()})
        if export.merge is None:
            card = model_card(report.published())
            (folder / CARD_FILE).write_bytes(card)
            report = replace(report, files=report.files | {CARD_FILE: len(card)})
        report = replace(report, seconds=round(clock.monotonic() - started, 3))
        (folder / RECORD_FILE).write_bytes(Record(identity=export.identity, report=report.published()).to_bytes())
    if not isinstance(place, Path):
        log(f"copying to {place}")
        upload(export.out, place)
    return report


def _prepare(store: Store, manifest: Manifest, config: Config, request: ExportRequest) -> _Export:
    run_dir = request.run_dir
    published = request.out or run_dir / EXPORT_FOLDER / Path(step_folder(manifest.step)).name
    own = [*([run_dir] if isinstance(run_dir, Path) else []), *([store.root] if isinstance(store, LocalStore) else [])]
    out = staging_folder(published)
    refuse_place(out, own, node_folder(run_dir) / EXPORT_FOLDER)
    merge: DecoderMerge | None = None
    adapter: AdapterExport | None = None
    files: tuple[WeightFile, ...] = ()
    if request.merge and config.model.adapter is None:
        raise UserError("--merge: the run has no adapter (model.adapter); remove the option")
    if request.average > 1 and config.model.adapter is not None:
        raise UserError(
            f"--average={request.average}: the mean of adapters is not the mean of the models with these adapters; "
            "export single steps with --merge"
        )
    with storage_answers(checkpoint_location(config, request.run_dir)):
        manifests = averaged_checkpoints(store, manifest, request.average)
        committed = b"".join(store.read_whole(manifest_key(one.step)) for one in manifests)
    if config.model.part == "text":
        is_adapter = config.model.adapter is not None
        if request.merge or not is_adapter:
            refuse_options(request)
        merge = plan_merge(config, base_state(manifest.state) if is_adapter else manifest.state)
        tokenizer = TokenizerFiles(words=_UNCHANGED, published=_UNCHANGED)
        architecture = Architecture(model=merge.model, generation=None)
        stored = merge.stored
        if is_adapter:
            adapter = adapter_export(config, manifest.state, architecture, request)
            merge = merged_decoder(config, manifest.state, merge) if request.merge else None
            stored, files = adapter.stored, adapter.files
    else:
        tokenizer = find_tokenizer(request.run_dir, request.tokenizer, trust_run=request.trust_run)
        architecture = describe(config, request.weights, tokenizer.end_tokens, is_tied=bool(manifest.state.tied))
        tokenizer.refuse_unknown_tokens(architecture.vocab_size)
        if config.model.adapter is not None:
            adapter = adapter_export(config, manifest.state, architecture, request)
            stored, files = adapter.stored, adapter.files
        else:
            stored = stored_tensors(architecture.model, manifest.state, request.weights, config.model.dtype)
        if stored:
            files = lay_out(published_tensors(architecture.model, stored), request.max_shard_bytes)
    contents = b"".join(name.encode() + b"\0" + content for name, content in sorted(tokenizer.files.items()))
    identity = Identity(
        manifest=hashlib.sha256(committed).hexdigest()[:16],
        weights=request.weights,
        max_shard_bytes=request.max_shard_bytes,
        tokenizer=hashlib.sha256(contents).hexdigest()[:16],
        checked=request.check,
        merged=request.merge,
        average=request.average,
    )
    return _Export(
        request=request,
        config=config,
        manifests=manifests,
        out=out.absolute(),
        published=published.absolute(),
        architecture=architecture,
        tokenizer=tokenizer,
        stored=stored,
        files=files,
        identity=identity,
        merge=merge,
        adapter=adapter,
    )


def _small_files(export: _Export) -> dict[str, bytes]:
    """Return the files other than weights. For a multimodal checkpoint there are none, because all files are copied."""
    if export.merge is not None:
        return {}
    own = export.adapter.small if export.adapter and export.is_adapter else export.architecture.files()
    hidden_size = export.architecture.model.config.get_text_config(decoder=True).hidden_size
    small = {**own, **export.tokenizer.files, **sentence_files(export.config, hidden_size)}
    if len(export.files) > 1:
        small[INDEX_FILE] = index_json(export.files)
    return small


def _check(export: _Export, folder: Path, weights: WeightReader, log: _Log) -> CheckResult:
    architecture = export.architecture
    sizes = architecture.vocab_size, architecture.max_positions
    sample = take_sample(export.request.run_dir, *sizes, trust_run=export.request.trust_run)
    log(f"checking: running {sum(map(len, sample.documents))} tokens through the live model and the exported model")
    model_config: dict[str, Any] = architecture.model.config.to_dict()
    stored = export.stored if export.adapter is None else export.adapter.live
    merged = DTYPES[_precision(export)] if export.request.merge else None
    result = check_export(folder, export.config, model_config, stored, weights, sample, merged_dtype=merged)
    if not result.holds:
        raise RunError(
            f"the export failed its check: {result.words}; nothing was published. Please report the architecture "
            f"({architecture.class_name}), or publish without the check (--no-check)"
        )
    return result


def _report(export: _Export, check: CheckResult | None, small: dict[str, int]) -> ExportReport:
    manifest, settings = export.manifest, export.config.model.adapter
    adapter = None
    if settings is not None and export.is_adapter:
        has_modules = bool(settings.modules_to_save or settings.train_embeddings or settings.train_norms)
        adapter = AdapterFacts(
            base=str(export.config.model.path),
            rank=max(settings.rank, *settings.ranks.values()) if settings.ranks else settings.rank,
            has_modules=has_modules,
            is_dora=settings.dora,
            base_class=auto_class(export.config.model.part, export.config.objective.task).__name__,
        )
    tensors = [tensor for file in export.all_files for tensor in file.tensors]
    return ExportReport(
        run=manifest.meta.run or export.config.run.name,
        step=manifest.step,
        attempt=manifest.attempt,
        trained_tokens=manifest.meta.tokens,
        data_digest=manifest.meta.digest,
        out=str(export.published),
        architecture=export.architecture.class_name,
        parameters=sum(tensor.num_elements for tensor in tensors),
        weights=_weights_words(export),
        files={file.name: file.num_bytes for file in export.all_files} | small,
        context_tokens=export.config.data.context_tokens,
        max_positions=export.architecture.max_positions,
        rope=export.architecture.rope,
        tokenizer=export.tokenizer.words,
        published_tokenizer=export.tokenizer.published,
        has_tokenizer=export.merge.has_tokenizer if export.merge else bool(export.tokenizer.files),
        loaded_with="AutoPeftModelForCausalLM"
        if export.is_adapter
        else auto_class(export.config.model.part, export.config.objective.task).__name__,
        versions=dict(manifest.meta.versions),
        check=check,
        seconds=0.0,
        was_there=False,
        adapter=adapter,
        averaged_steps=tuple(one.step for one in export.manifests) if len(export.manifests) > 1 else (),
        training=training_facts(export.config, manifest, export.request.run_dir),
    )


def _weights_words(export: _Export) -> str:
    stored = source_format(export.config)
    base = "" if stored is None else f"; the base model's files were quantized ({stored})"
    return f"{_precision_words(export)}{base}"


def _precision_words(export: _Export) -> str:
    if export.merge is not None:
        return "the text decoder, in the types of the multimodal checkpoint; everything else unchanged"
    name, adapter = _precision(export), export.config.model.adapter
    if export.is_adapter:
        assert adapter is not None
        return f"{name}, an adapter of rank {adapter.rank} with its fully trained modules, without the base model"
    if adapter is not None:
        base_dtype = export.config.model.base_dtype
        base = "" if base_dtype == "bf16" else f" into a base dequantized from {base_dtype}"
        return f"{name}, with the adapter of rank {adapter.rank} merged{base} in fp32"
    if len(export.manifests) > 1:
        return f"{name}, averaged in fp32 from the master weights"
    if name == export.config.model.dtype:
        return f"{name}, as used in training"
    if name == "fp32":
        return "fp32, the optimizer's master weights"
    return f"{name}, rounded from the fp32 master weights"


def _precision(export: _Export) -> str:
    return export.config.model.dtype if export.request.weights == "model" else export.request.weights
