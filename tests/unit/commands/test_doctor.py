"""The doctor names what is wrong and what to do; it never stops at the first finding."""

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_ulysses.commands import doctor
from ray_ulysses.commands.doctor import Check, check_import, check_python, exit_code, render_check, render_sum


@pytest.mark.parametrize(("version", "level"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "fail")])
def test_only_supported_versions_of_python_pass(version, level):
    assert check_python(version).level == level


def test_a_package_is_there_with_its_version_or_fails_with_a_hint():
    assert check_import("pytest").detail == pytest.__version__
    absent = check_import("no_such_package_at_all")
    assert absent.level == "fail" and absent.detail.startswith("not installed") and absent.hint


def test_a_broken_package_fails_and_what_it_prints_is_not_shown(capsys, monkeypatch):
    def load(name):
        print("noise")
        raise OSError("libcudart.so: cannot open")

    monkeypatch.setattr("importlib.import_module", load)
    check = check_import("deepspeed")
    assert check.level == "fail" and "libcudart.so: cannot open" in check.detail
    assert capsys.readouterr().out == ""


def test_storage_that_can_not_be_written_fails(tmp_path):
    (tmp_path / "file").write_text("")
    check = doctor.check_run_storage(tmp_path / "file" / "runs")
    assert check.level == "fail" and "run.storage" in check.detail
    assert doctor.check_run_storage(tmp_path / "runs").level == "ok"
    assert doctor.check_free_disk(tmp_path / "a" / "b").detail.endswith(f"free at {tmp_path}")
    assert doctor.check_shared_memory(Path("/nonexistent")).level == "warn"


@pytest.mark.parametrize(("limit", "level"), [(64 << 10, "warn"), (resource.RLIM_INFINITY, "ok")])
def test_a_machine_with_infiniband_or_efa_must_let_memory_be_locked(limit, level, tmp_path):
    (check,) = doctor.check_locked_memory(tmp_path, limit)
    assert check.level == level
    assert ("memlock=-1:-1" in check.hint) == (level == "warn")
    assert list(doctor.check_locked_memory(tmp_path / "none", limit)) == []


def test_a_machine_without_a_gpu_can_run_on_cpu(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    levels = {check.name: check.level for check in doctor.check_accelerator()}
    assert levels == {"accelerator": "warn", "collectives": "ok"}
    assert doctor.check_flash_attention().level == "ok"


NVIDIA = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (dvs-builder@U22)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""


def gpu_torch(cudnn, nccl=(2, 28, 9)):
    return SimpleNamespace(
        version=SimpleNamespace(cuda="13.0"),
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: cudnn)),
        cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: nccl)),
    )


@pytest.mark.parametrize(
    ("cudnn", "has_nccl", "levels"),
    [(91900, True, ["ok", "ok", "ok"]), (None, False, ["ok", "warn", "fail"])],
    ids=["whole", "lacking"],
)
def test_the_versions_of_driver_cudnn_and_nccl_are_said(tmp_path, cudnn, has_nccl, levels):
    if has_nccl:
        (tmp_path / "version").write_text(NVIDIA)
    dist = SimpleNamespace(is_nccl_available=lambda: has_nccl)
    checks = {one.name: one for one in doctor.gpu_versions(gpu_torch(cudnn), dist, tmp_path / "version")}
    assert [checks[name].level for name in ("driver", "cudnn", "collectives")] == levels
    assert checks["driver"].detail.startswith("580.82.07, " if has_nccl else "of unknown version")
    if has_nccl:
        assert (checks["cudnn"].detail, checks["collectives"].detail) == ("9.19.0", "nccl 2.28.9")


def test_checks_are_lines_that_end_with_the_sum_and_one_failure_decides_the_exit_code():
    good = Check(name="python", level="ok", detail="3.11")
    checks = [good, Check(name="shared memory", level="fail", detail="broken", hint="repair it")]
    assert [line for check in checks for line in render_check(check).splitlines()] == [
        "ok    python         3.11",
        "fail  shared memory  broken",
        "                     -> repair it",
    ]
    assert render_sum(checks) == "not ready: 1 failed, 0 warnings, 2 checked"
    warning = Check(name="disk", level="warn", detail="d")
    assert (exit_code([good, warning]), exit_code([*checks, warning])) == (0, 1)


@pytest.mark.parametrize("ok", [True, False])
def test_the_self_test_is_one_of_the_checks(ok, monkeypatch):
    from ray_ulysses.engine import self_test_local

    result = self_test_local.LocalSelfTest(ok=ok, text="what it said", hint="" if ok else "what to do")
    monkeypatch.setattr(self_test_local, "run_local_self_test", lambda: result)
    check = doctor.check_exactness()
    assert (check.name, check.level, check.detail) == ("self-test", "ok" if ok else "fail", "what it said")
    assert check.hint == result.hint


def test_the_self_test_is_left_out_where_a_package_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "_REQUIRED", ("torch", "no_such_package_at_all"))
    monkeypatch.setattr(doctor, "check_exactness", lambda: pytest.fail("it can't start"))
    names = [check.name for check in doctor.check_machine()]
    assert "no_such_package_at_all" in names
    assert "self-test" not in names


@pytest.mark.slow
@pytest.mark.distributed
def test_this_machine_passes_the_self_test():
    check = doctor.check_exactness()
    assert check.level == "ok", check
    assert "norm ratio 1.000" in check.detail
