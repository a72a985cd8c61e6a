"""The training variant of a chat template, which marks what the assistant says, from the package TRL."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ray_ulysses.data.tokenize.chat_template import own_template
from ray_ulysses.errors import UserError

TRAINING = "training"
_SUFFIX = "_training.jinja"


def training_template(tokenizer: str | Path, folder: Path | None = None) -> str:
    """Return the text of the training variant of a tokenizer's own chat template.

    Args:
        tokenizer: The tokenizer's directory.
        folder: TRL's templates; None for those of the installed package, of which nothing is imported.

    Raises:
        UserError: The tokenizer has no template, TRL is not installed, or TRL has no variant of this template.
    """
    own = own_template(Path(tokenizer)).strip()
    folder = folder or _installed()
    hint = "leave the option out, since the turns of any template are found by rendering (--turns split)"
    if folder is None:
        raise UserError(
            f"--chat-template={TRAINING}: needs the templates of the package trl; install it (pip install trl), or "
            f"{hint}"
        )
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        plain = path.with_name(path.name.removesuffix(_SUFFIX) + ".jinja")
        if plain.is_file() and plain.read_text(encoding="utf-8").strip() == own:
            return path.read_text(encoding="utf-8")
    raise UserError(
        f"--chat-template={TRAINING}: TRL has no training variant of the chat template of tokenizer={tokenizer}; name "
        f"a file, or {hint}"
    )


def _installed() -> Path | None:
    found = importlib.util.find_spec("trl")
    places = [] if found is None else found.submodule_search_locations or []
    return next((Path(place) / "chat_templates" for place in places if (Path(place) / "chat_templates").is_dir()), None)
