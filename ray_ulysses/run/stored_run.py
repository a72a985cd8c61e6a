"""Reads the configuration in a run's directory, which somebody else may have written.

Without ``trust_run`` the file of secrets that it names is not read. Where it names a location, `refuse_server` comes
before the location is opened: `stored_checkpoints`, and `find_sources` of the corpora.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.config.loading import load_config
from ray_ulysses.run.secrets_file import use_secrets
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.place import Place

if TYPE_CHECKING:
    from ray_ulysses.config import Config


def stored_config(run_dir: Place, *, trust_run: bool = False) -> Config:
    """Return the configuration in a run's directory.

    Args:
        run_dir: The directory.
        trust_run: Whether its file of secrets is used, as for the user's own configuration.

    Raises:
        ConfigError: It can't be read.
        UserError: Its file of secrets can't be used.
    """
    config = load_config(run_dir / CONFIG_FILE)
    if trust_run:
        use_secrets(config, is_needed=False)
    return config
