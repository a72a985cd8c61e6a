"""Write what `axolotl.yml` names: a small random model with a tokenizer of bytes, and documents from Python itself."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

bytes_of_text = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(bytes_of_text)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
with_end = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
with_end.save_pretrained("tiny")

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(with_end), eos_token_id=with_end.eos_token_id, **sizes))
model.save_pretrained("tiny")

library = Path(sysconfig.get_path("stdlib"))
with Path("texts.jsonl").open("w", encoding="utf-8") as lines:
    for file in sorted(library.glob("*.py")):
        lines.write(json.dumps({"text": file.read_text(encoding="utf-8")}) + "\n")
