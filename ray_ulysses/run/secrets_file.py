"""Reads secrets from a file on each node, so that a run does not need to send secrets to its processes.

Another user may have written the configuration in a run's directory. Without ``trust_run``, the secrets file in this
configuration is not read, and `refuse_server` checks all locations in the configuration before they are opened (see
`stored_checkpoints`, and `find_sources` for corpora).
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Collection
from dataclasses import dataclass

from ray_ulysses.config import Config
from ray_ulysses.config.credentials import CREDENTIALS, steers_programs
from ray_ulysses.config.loading import load_config
from ray_ulysses.errors import Problem, UserError
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.place import Place
from ray_ulysses.storage.regular import open_regular

SETTING = "cluster.secrets_file"
_MOST_BYTES = 2**16
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class SecretsFile:
    """A reference to a secrets file, which may not exist."""

    path: str
    names: tuple[str, ...] = ()
    """Variables that the file may set in addition to credentials, from ``cluster.secrets_names``."""

    @classmethod
    def of(cls, config: Config) -> SecretsFile | None:
        """Return the secrets file of a configuration, or None if ``cluster.secrets_file`` is not set."""
        path = config.cluster.secrets_file
        return None if path is None else cls(path=path, names=config.cluster.secrets_names)

    def use(self) -> None:
        """Add the file's variables to this process's environment; see `read_secrets` for the exceptions."""
        os.environ.update(read_secrets(self.path, self.names))


def use_secrets(config: Config, *, is_needed: bool = True) -> None:
    """Add the variables in ``cluster.secrets_file``, if set, to this process's environment.

    Args:
        config: The run's configuration.
        is_needed: Whether the file must be readable. Commands that only read a run also work without the file, so that
            users other than the file's owner can run them.

    Raises:
        UserError: The file is missing or invalid. The message contains none of the file's values.
    """
    file = SecretsFile.of(config)
    if file is None or not (is_needed or os.access(os.path.expanduser(file.path), os.R_OK)):
        return
    try:
        file.use()
    except FileNotFoundError as error:
        raise _refusal(file.path, "does not exist", "create it on every node, or remove the setting") from error


def stored_config(run_dir: Place, *, trust_run: bool = False) -> Config:
    """Return the configuration stored in a run's directory.

    Args:
        run_dir: The run's directory.
        trust_run: Whether to read the secrets file that the configuration specifies.

    Raises:
        ConfigError: The configuration can't be read.
        UserError: The secrets file is invalid.
    """
    config = load_config(run_dir / CONFIG_FILE)
    if trust_run:
        use_secrets(config, is_needed=False)
    return config


def read_secrets(path: str, names: Collection[str] = ()) -> dict[str, str]:
    """Return the variables in a secrets file: ``NAME=VALUE`` lines, optionally quoted, and ``#`` comment lines.

    Args:
        path: The path of the file.
        names: Variables that the file may set in addition to credentials.

    Raises:
        UserError: Other users can access the file, a line is malformed, or the file sets a forbidden variable. The
            message contains none of the file's values.
        FileNotFoundError: The file does not exist.
    """
    try:
        with open_regular(os.path.expanduser(path)) as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            if mode & 0o077:
                rule = f"is accessible to users other than its owner (mode {mode:04o})"
                raise _refusal(path, rule, f"run chmod 600 {path} on that node")
            content = stream.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        hint = "use a file that this user can read"
        raise _refusal(path, f"can't be read ({error.strerror})", hint) from error
    if len(content) > _MOST_BYTES:
        raise _refusal(path, f"is larger than {_MOST_BYTES // 1024} KiB", "use a file of NAME=VALUE lines")
    found = {}
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None or not text.isprintable() or "\ufffd" in text:
            rule = f"line {number} does not have the form NAME=VALUE"
            raise _refusal(path, rule, "correct the line; comments start with #")
        name, value = match[1], match[2]
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        found[name] = value[1:-1] if quoted else value
    # A variable that is not a credential, such as PYTHONPATH, could make the run's processes execute other code.
    others = [name for name in found if name not in CREDENTIALS and name not in names]
    if steering := [name for name in others if steers_programs(name)]:
        rule = f"sets {', '.join(steering)}, which can change the executed programs or redirect their connections"
        raise _refusal(path, rule, "remove them from the file and set them in the environment of every node")
    if others:
        rule = f"sets {', '.join(others)}, but the file may set only credentials"
        hint = "set other variables in the environment of every node, or list them in cluster.secrets_names"
        raise _refusal(path, rule, hint)
    return found


def _refusal(path: str, rule: str, hint: str) -> UserError:
    problem = Problem(path=SETTING, value=path, rule=f"on {socket.gethostname()}: {rule}", hint=hint)
    return UserError(str(problem))
