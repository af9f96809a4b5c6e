"""Memory within the limits of control groups, whose files are laid out here as the kernel does."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention.base.memory import container_memory

MIB = 2**20


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


@pytest.mark.quick
def test_the_tightest_limit_of_version_2_counts(tmp_path: Path) -> None:
    assert container_memory(str(tmp_path)) is None, "no control groups"
    group = "sys/fs/cgroup/jobs/job"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/job",
            f"{group}/memory.max": "max",
            f"{group}/memory.current": 30 * MIB,
            f"{group}/memory.stat": "anon 1",
        },
    )
    assert container_memory(str(tmp_path)) is None, "no limit"
    above = "sys/fs/cgroup/jobs"
    stat = f"anon 5\ninactive_file {20 * MIB}\nactive_file 7"
    write(
        tmp_path, {f"{above}/memory.max": 100 * MIB, f"{above}/memory.current": 90 * MIB, f"{above}/memory.stat": stat}
    )
    assert container_memory(str(tmp_path)) == 30 * MIB, "files that are cached are free"
    write(tmp_path, {f"{group}/memory.max": 50 * MIB})
    assert container_memory(str(tmp_path)) == 20 * MIB
    write(tmp_path, {f"{group}/memory.current": 60 * MIB})
    assert container_memory(str(tmp_path)) == 0


@pytest.mark.quick
def test_a_container_of_version_1_sees_its_group_at_the_top(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/0a\n3:memory:/docker/0a\n0::/x",
            f"{top}/memory.limit_in_bytes": 64 * MIB,
            f"{top}/memory.usage_in_bytes": 40 * MIB,
            f"{top}/memory.stat": f"cache 1\ntotal_inactive_file {8 * MIB}",
        },
    )
    assert container_memory(str(tmp_path)) == 32 * MIB
