"""A run's configuration: the schema, loading from YAML, and the rules between settings.

Nothing in this package imports torch or reads the environment: a configuration depends only on its file and ``--set``.
"""

from ray_ulysses.config.loading import load_config, parse_config
from ray_ulysses.config.resume import resume_conflicts, resume_fingerprint
from ray_ulysses.config.schema import Config

__all__ = ["Config", "load_config", "parse_config", "resume_conflicts", "resume_fingerprint"]
