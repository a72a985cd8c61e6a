"""A configuration, a corpus of given lengths and their data plan, without a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ray_ulysses.config import Config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.flat_file import FlatInfo
from ray_ulysses.data.corpus.format import CorpusInfo
from ray_ulysses.data.plan.corpus_set import CorpusSet, PlannedSource, plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.planning import build_segment
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.tokenize.encoding import EncodingInfo
from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer, TokenizerInfo
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.storage.local import LocalStore

MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 257,
}  # fmt: skip
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
}  # fmt: skip


def make_config(model_config: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "demo", "storage": "/runs"},
        "model": {"init": "random", "config": model_config or MODEL},
        "data": {"path": "/corpus", "context_tokens": 64, "rows_per_step": 4},
        "optimizer": {"lr": 3e-4},
        "schedule": {"warmup_steps": 1},
        "parallel": {"sp_size": 2},
        "cluster": {"workers": 4},
    }
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    return Config.model_validate(tree)


def llama_config(
    context: int = 131_072, *, sp_size: int = 8, workers: Any = 8, device: Any = None, **memory: Any
) -> Config:
    """Return the configuration of a pretrained 8B model on GPUs."""
    return make_config(
        LLAMA_3_8B,
        model={"config": LLAMA_3_8B, "init": "pretrained", "path": "/model"},
        data={"context_tokens": context, "rows_per_step": 8},
        parallel={"sp_size": sp_size},
        cluster={"workers": workers, "gpus_per_worker": 1, "device": device},
        memory=memory,
    )


def make_shape(config: Config) -> ModelShape:
    assert config.model.config is not None
    return ModelShape.from_config_dict(config.model.config)


def make_corpus(lengths: list[int], max_token_id: int = 256) -> CorpusSet:
    tokenizer = TokenizerInfo(kind="bytes", name="bytes", vocab_size=257, eos_token_id=256, fingerprint="f")
    info = CorpusInfo(
        tokenizer=tokenizer,
        vocabulary=ByteTokenizer().tokens.vocabulary(),
        encoding=EncodingInfo(bos_token_id=None, eos_token_id=256),
        dtype="uint16",
        num_documents=len(lengths),
        num_tokens=sum(lengths),
        max_token_id=max_token_id,
        num_quarantined=0,
        shards=(),
        documents_bytes=0,
        documents_crc32=0,
        lengths_crc32=0,
        index=FlatInfo(num_items=2 * len(lengths), crc32=0, blocks_crc32=0),
        byte_unigram_nats=3.25,
        token_unigram_nats=3.26,
        signature="s",
    )
    corpus = Corpus(LocalStore(Path("/corpus")), info)
    corpus.lengths = np.array(lengths, dtype=np.uint32)
    source = PlannedSource(path="/corpus", fingerprint=corpus.fingerprint, num_documents=len(lengths))
    return CorpusSet([source], [corpus])


def make_plan(config: Config, corpora: CorpusSet) -> Plan:
    settings = PlanSettings(
        seed=config.run.seed,
        context_tokens=config.data.context_tokens,
        pad_multiple=4,
        rows_per_step=config.data.rows_per_step,
        epochs=config.data.epochs,
        eval_fraction=config.data.eval_fraction,
        eval_rows=config.data.eval_rows,
        balance_steps=config.data.balance_steps,
    )
    return Plan(segments=(build_segment(plan_input(corpora), settings),))
