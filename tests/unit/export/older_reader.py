"""Loads directories with the running interpreter's Transformers, and compares their logits.

Usage: ``python older_reader.py FOLDER``. Each subdirectory with ``expected.pt`` is a case. ``outcomes.json`` gets the
largest difference relative to the largest logit, or an error, or ``unknown`` for an unknown model type.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM


def outcome(folder: Path) -> float | str:
    if json.loads((folder / "config.json").read_text())["model_type"] not in CONFIG_MAPPING:
        return "unknown"
    expected = torch.load(folder / "expected.pt")
    try:
        config = AutoConfig.from_pretrained(folder)
        if hasattr(config, "use_mamba_kernels"):
            config.use_mamba_kernels = False
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, attn_implementation="eager", dtype=torch.float32
        )
        # Transformers 4 reads some activation parameters in bf16 regardless of the dtype, and then computes in bf16.
        model = model.float().eval()
        ids = expected["ids"]
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return float((logits - expected["logits"]).abs().max() / expected["logits"].abs().max())


if __name__ == "__main__":
    root = Path(sys.argv[1])
    found = {path.parent.name: outcome(path.parent) for path in sorted(root.glob("*/expected.pt"))}
    (root / "outcomes.json").write_text(json.dumps(found))
