"""Reads secrets from a file on each node, so that they need not be sent to the processes of a run.

The configuration in a run's directory may be somebody else's: without ``trust_run``, the secrets file that it names is
not read, and `refuse_server` checks each location that it names before it is opened (`stored_checkpoints`, and
`find_sources` for corpora).
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_ulysses.config.credentials import CREDENTIALS, steers_programs
from ray_ulysses.config.loading import load_config
from ray_ulysses.errors import Problem, UserError
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.place import Place
from ray_ulysses.storage.regular import open_regular

if TYPE_CHECKING:
    from ray_ulysses.config import Config

SETTING = "cluster.secrets_file"
_MOST_BYTES = 2**16
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class SecretsFile:
    """A secrets file, which need not exist."""

    path: str
    names: tuple[str, ...] = ()
    """Variables that it may set besides credentials: ``cluster.secrets_names``."""

    @classmethod
    def of(cls, config: Config) -> SecretsFile | None:
        """Return the file that a configuration names, if any."""
        path = config.cluster.secrets_file
        return None if path is None else cls(path=path, names=config.cluster.secrets_names)

    def use(self) -> None:
        """Put its variables into this process's environment; the exceptions are those of `read_secrets`."""
        os.environ.update(read_secrets(self.path, self.names))


def use_secrets(config: Config, *, is_needed: bool = True) -> None:
    """Put the variables of ``cluster.secrets_file``, if it is set, into this process's environment.

    Args:
        config: The run's configuration.
        is_needed: Whether the file must exist; a command that only reads a run works without it, also as a user other
            than the file's owner.

    Raises:
        UserError: The file can't be used; the text contains no value of it.
    """
    file = SecretsFile.of(config)
    if file is None or not (is_needed or os.access(os.path.expanduser(file.path), os.R_OK)):
        return
    try:
        file.use()
    except FileNotFoundError as error:
        raise _refusal(file.path, "does not exist", "write it on every node, or remove the setting") from error


def stored_config(run_dir: Place, *, trust_run: bool = False) -> Config:
    """Return the configuration in a run's directory.

    Args:
        run_dir: The directory.
        trust_run: Whether to use its secrets file, as for the user's own configuration.

    Raises:
        ConfigError: It can't be read.
        UserError: Its secrets file can't be used.
    """
    config = load_config(run_dir / CONFIG_FILE)
    if trust_run:
        use_secrets(config, is_needed=False)
    return config


def read_secrets(path: str, names: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of a file: lines ``NAME=VALUE``, the value optionally quoted, and lines that begin with #.

    Args:
        path: The file.
        names: Variables that it may set besides credentials.

    Raises:
        UserError: Users other than its owner can read it, a line is malformed, or it sets a forbidden variable; the
            text contains none of its values.
        FileNotFoundError: There is no such file.
    """
    try:
        with open_regular(os.path.expanduser(path)) as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            if mode & 0o077:
                rule = f"can be accessed by others than its owner (mode {mode:04o})"
                raise _refusal(path, rule, f"run chmod 600 {path} on that node")
            content = stream.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        hint = "give a file that this user can read"
        raise _refusal(path, f"can't be read ({error.strerror})", hint) from error
    if len(content) > _MOST_BYTES:
        raise _refusal(path, f"is larger than {_MOST_BYTES // 1024} KiB", "give a file of NAME=VALUE lines")
    found = {}
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None or not text.isprintable() or "\ufffd" in text:
            raise _refusal(path, f"line {number} is not of the form NAME=VALUE", "correct it; a comment begins with #")
        name, value = match[1], match[2]
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        found[name] = value[1:-1] if quoted else value
    # Not credentials: such a variable can make every process of the run execute other code.
    others = [name for name in found if name not in CREDENTIALS and name not in names]
    if steering := [name for name in others if steers_programs(name)]:
        rule = f"sets {', '.join(steering)}, which decides what programs run or through which host they connect"
        raise _refusal(path, rule, "remove it there, and set it in the environment of every node")
    if others:
        rule = f"sets {', '.join(others)}, which is not a credential"
        hint = "set it in the environment of every node, or list it in cluster.secrets_names"
        raise _refusal(path, rule, hint)
    return found


def _refusal(path: str, rule: str, hint: str) -> UserError:
    problem = Problem(path=SETTING, value=path, rule=f"on {socket.gethostname()}: {rule}", hint=hint)
    return UserError(str(problem))
