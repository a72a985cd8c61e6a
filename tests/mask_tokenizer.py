"""A WordPiece tokenizer with a mask token, made from letters."""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def mask_tokenizer(folder: Path, *, has_mask: bool = True) -> Path:
    """Write a tokenizer whose tokens are characters, in words, and return its directory."""
    folder.mkdir(parents=True)
    letters = [*string.ascii_letters, *string.digits, *string.punctuation]
    special = SPECIAL if has_mask else SPECIAL[:-1]
    tokens = [*special, *letters, *(f"##{one}" for one in letters)]
    tokenizer = Tokenizer(models.WordPiece({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "[SEP]", "cls_token": "[CLS]", **({"mask_token": "[MASK]"} if has_mask else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder
