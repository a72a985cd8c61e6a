"""The file of secrets: what is read of it, and what is refused without a word of its content."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ray_ulysses.config.credentials import CREDENTIALS
from ray_ulysses.config.loading import parse_config
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.run.secrets_file import read_secrets, use_secrets
from tests.unit.config.trees import small_tree


def write(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.touch(mode=0o600)
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_names_values_quotes_and_comments_are_read(tmp_path: Path) -> None:
    content = b"# of the storage\n\nA=1\nexport B = 'two words'\nC=\"a=b#c\"\nD=x#y==\nE=\nF='\n"
    assert read_secrets(write(tmp_path / "secrets", content), "ABCDEF") == {
        "A": "1", "B": "two words", "C": "a=b#c", "D": "x#y==", "E": "", "F": "'",
    }  # fmt: skip


def test_a_file_that_others_can_use_is_refused_with_the_hint(tmp_path: Path) -> None:
    for mode in (0o640, 0o604):
        with pytest.raises(UserError, match=rf"cluster\.secrets_file=.*{mode:04o}.*chmod 600"):
            read_secrets(write(tmp_path / "secrets", b"A=hunter2", mode))


def test_another_form_is_refused_by_its_line_alone(tmp_path: Path) -> None:
    for content, said in (
        (b"A=1\nhunter2", "line 2 does not have the form NAME=VALUE; correct the line"),
        (b"A=hunter2\0", "line 1 does not have the form"),
        (b"A=hunter2\xff", "line 1 does not have the form"),
        (b"A=hunter2" * 10_000, "is larger than 64 KiB"),
    ):
        with pytest.raises(UserError, match=said) as refused:
            read_secrets(write(tmp_path / "secrets", content))
        assert "hunter2" not in str(refused.value)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UserError, match="can't be read"):
            read_secrets(str(path))


def test_the_file_overrides_the_environment_and_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_A_TEST", "from the environment")
    config = parse_config(small_tree(cluster__secrets_file="secrets", cluster__secrets_names=["SECRET_OF_A_TEST"]))
    config = config.with_absolute_paths(tmp_path)
    use_secrets(config, is_needed=False)
    with pytest.raises(UserError, match="does not exist; create it on every node"):
        use_secrets(config)
    write(tmp_path / "secrets", b"SECRET_OF_A_TEST=from the file")
    with monkeypatch.context() as other_user:
        # Root may read every file.
        other_user.setattr(os, "access", lambda path, mode: path != str(tmp_path / "secrets"))
        use_secrets(config, is_needed=False)
    assert os.environ["SECRET_OF_A_TEST"] == "from the environment"
    use_secrets(config)
    assert os.environ["SECRET_OF_A_TEST"] == "from the file"


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "PATH", "https_proxy", "BASH_ENV", "RAY_X"])
def test_a_variable_that_decides_what_runs_is_refused_even_if_it_is_listed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "secrets", f"HF_TOKEN=a\n{name}=hunter2".encode())
    for names in ((), ("HF_ENDPOINT",)):
        with pytest.raises(UserError, match=f"sets {name}, which can change") as refused:
            read_secrets(path, names)
        assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigError) as error:
        parse_config(small_tree(cluster__secrets_file=path, cluster__secrets_names=["HF_ENDPOINT", name]))
    (problem,) = error.value.problems
    assert problem.path == "cluster.secrets_names" and f"lists {name}, which can change" in problem.rule


def test_a_variable_that_is_not_a_credential_needs_the_setting(tmp_path: Path) -> None:
    for name in ("AWS_ENDPOINT_URL", "HF_ENDPOINT", "MLFLOW_TRACKING_URI", "ANYTHING"):
        path = write(tmp_path / "secrets", f"AWS_SECRET_ACCESS_KEY=a\n{name}=hunter2".encode())
        with pytest.raises(UserError, match=f"sets {name}, .* cluster.secrets_names") as refused:
            read_secrets(path)
        assert "hunter2" not in str(refused.value)
        assert read_secrets(path, [name])[name] == "hunter2"


def test_every_credential_that_the_documentation_names_may_be_in_the_file(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "recover.md").read_text()
    section = text.partition("\n### Secrets\n")[2].partition("\n## ")[0]
    listed = section[section.index("set only credentials") :]
    assert set(re.findall(r"`([A-Z][A-Z0-9_]+)`", listed)) >= CREDENTIALS
    content = "".join(f"{name}=x\n" for name in CREDENTIALS)
    assert read_secrets(write(tmp_path / "secrets", content.encode())).keys() == CREDENTIALS
