"""Free memory is the machine's, or what a container leaves of it."""

import pytest

from specengine.utils.free_memory import free_memory

MEMINFO = "MemTotal:       2000 kB\nMemFree:         100 kB\nMemAvailable:    1000 kB\n"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def limit(root, most, used=300 << 10, inactive=50 << 10):
    group = root / "sys/fs/cgroup"
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 7\ninactive_file {inactive}\nactive_file 9\n")


def test_what_the_machine_could_give_counts(root):
    assert free_memory(root) == 1000 << 10
    limit(root, "max")
    assert free_memory(root) == 1000 << 10
    limit(root, 10**12)
    assert free_memory(root) == 1000 << 10


def test_a_container_has_less(root):
    limit(root, 800 << 10)
    assert free_memory(root) == (800 - 300 + 50) << 10


def test_nothing_is_known_where_there_is_no_proc(tmp_path):
    assert free_memory(tmp_path) is None


def test_this_machine_has_some():
    assert free_memory() is None or free_memory() > 1 << 20
