"""Detects mounts whose locks do not hold between hosts."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

MOUNT_TABLE = Path("/proc/self/mountinfo")
_NFS = {"nfs", "nfs4"}
# nfs(5): with these each host keeps its own flocks, so that two hosts can hold the same lock.
_LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock"}


def local_lock_option(path: Path, table: str) -> str | None:
    """Return the option by which a network mount keeps flocks to each host; None if it does not (pure).

    Args:
        path: An absolute path with no symbolic links.
        table: What ``/proc/self/mountinfo`` says; its format is described in proc_pid_mountinfo(5).
    """
    found: tuple[int, str, set[str]] = (-1, "", set())
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        fields, ends = before.split(), after.split()
        if len(fields) < 6 or len(ends) < 3:
            continue
        mount = PurePosixPath(fields[4].replace("\\040", " "))
        # A later line covers an earlier one at the same place.
        if path.is_relative_to(mount) and len(mount.parts) >= found[0]:
            found = (len(mount.parts), ends[0], set(ends[2].split(",")) | set(fields[5].split(",")))
    options = found[2] & _LOCAL_LOCKS if found[1] in _NFS else set()
    return min(options, default=None)


def read_mount_table() -> str:
    """Return the mounts that this process sees; nothing where the system does not say."""
    try:
        return MOUNT_TABLE.read_text()
    except OSError:
        return ""
