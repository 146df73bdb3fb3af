"""offload/budget.py: /proc/meminfo and memory groups of both versions, from made-up trees."""

import pytest

from dali_gguf.errors import InputError, MemoryBudgetError
from dali_gguf.offload.budget import available, parse_size, show_size

GIB = 1 << 30


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root, mounts="", groups="", gib=16):
    write(root, {
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {gib << 20} kB\n",
        "proc/self/mountinfo": mounts,
        "proc/self/cgroup": groups,
    })


V1 = (
    "33 24 0:29 / /cg/memory rw shared:9 - cgroup cgroup rw,memory\n"
    "32 24 0:28 / /cg/cpu rw - cgroup cgroup rw,cpu\n"
)
V2 = "33 24 0:29 / /cg rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def v1_group(limit, used, file=0):
    return {
        "memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"cache {file}\ntotal_inactive_file {file // 2}\n"
                       f"total_active_file {file - file // 2}\n",
    }


def v2_group(limit, used, file=0, high="max"):
    return {
        "memory.max": f"{limit}\n", "memory.high": f"{high}\n", "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {file}\nactive_file 0\n",
    }


def group(root, folder, files):
    write(root, {f"{folder}/{name}": text for name, text in files.items()})


def test_without_groups_the_machine_decides(tmp_path):
    machine(tmp_path, gib=16)
    assert available(tmp_path).nbytes == 16 * GIB
    assert "machine" in available(tmp_path).source


def test_version_1_takes_the_least_of_own_group_and_ancestors(tmp_path):
    machine(tmp_path, V1, "4:memory:/a/b\n3:cpu:/\n0::/\n")
    group(tmp_path, "cg/memory", v1_group(9223372036854771712, 0))
    group(tmp_path, "cg/memory/a", v1_group(4 * GIB, 3 * GIB, file=GIB))
    group(tmp_path, "cg/memory/a/b", v1_group(8 * GIB, GIB))
    assert available(tmp_path).nbytes == 2 * GIB
    assert available(tmp_path).source.endswith("cg/memory/a")


def test_version_2_counts_high_as_a_limit_and_file_cache_as_free(tmp_path):
    machine(tmp_path, V2, "0::/user/app\n")
    group(tmp_path, "cg/user", v2_group("max", 7 * GIB))
    group(tmp_path, "cg/user/app", v2_group(8 * GIB, 5 * GIB, file=2 * GIB, high=6 * GIB))
    assert available(tmp_path).nbytes == 3 * GIB


def test_a_path_of_the_host_inside_a_container_means_the_mount_itself(tmp_path):
    machine(tmp_path, V2, "0::/docker/123abc\n")
    group(tmp_path, "cg", v2_group(2 * GIB, GIB))
    assert available(tmp_path).nbytes == GIB


def test_a_mount_that_shows_a_subtree_only(tmp_path):
    mounts = "33 24 0:29 /docker/123 /cg/memory rw - cgroup cgroup rw,memory\n"
    machine(tmp_path, mounts, "4:memory:/docker/123/inner\n")
    group(tmp_path, "cg/memory/inner", v1_group(3 * GIB, GIB))
    assert available(tmp_path).nbytes == 2 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path):
    machine(tmp_path, V2, "0::/\n")
    group(tmp_path, "cg", v2_group(GIB, 2 * GIB))
    assert available(tmp_path).nbytes == 0


def test_no_figure_asks_for_the_flag(tmp_path):
    write(tmp_path, {"proc/meminfo": "MemTotal: 1 kB\n"})
    with pytest.raises(MemoryBudgetError, match="--ram"):
        available(tmp_path)


def test_this_machine_has_an_answer():
    room = available()
    assert 0 < room.nbytes < 1 << 50 and room.source


@pytest.mark.parametrize("text, nbytes", [
    ("6G", 6 * GIB), ("6g", 6 * GIB), ("6GB", 6 * GIB), ("1.5GiB", 3 * GIB // 2),
    ("800M", 800 << 20), ("4096", 4096), (" 2 T ", 2 << 40),
])
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "six", "-1G", "0", "6X", "6G G", "nan"])
def test_sizes_that_are_none(text):
    with pytest.raises(InputError, match="write 6G"):
        parse_size(text)


def test_sizes_as_people_write_them():
    assert show_size(6 * GIB) == "6.0G" and show_size(800 << 20) == "800M" and show_size(5) == "1M"
