"""The configuration of a run: a schema, its YAML file, and the rules between settings.

Nothing here imports torch or reads the environment: a configuration depends on its file and ``--set`` alone.
"""

from ray_ulysses.config.loading import load_config, parse_config
from ray_ulysses.config.resume import resume_conflicts, resume_fingerprint
from ray_ulysses.config.schema import Config

__all__ = ["Config", "load_config", "parse_config", "resume_conflicts", "resume_fingerprint"]
