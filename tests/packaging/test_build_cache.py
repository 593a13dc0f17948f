"""A second installation takes the core from the cache, and only the core that its sources would give."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.build_scripts import ROOT, loaded

build_cache = loaded("build_cache")
FACTS = ["g++ 12.2.0", "cpython-311"]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what a build reads."""
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "csrc", root / "csrc")
    for name in build_cache.SCRIPTS:
        shutil.copy(ROOT / name, root / name)
    return root


class FakeBuild:
    """An installation whose compiler writes the number of its calls."""

    def __init__(self, folder: Path | None, target: Path) -> None:
        self.folder = folder
        self.target = target
        self.calls = 0

    def compile(self) -> None:
        self.calls += 1
        self.target.write_bytes(b"core %d" % self.calls)

    def install(self, key: str, make_key: Callable[[], str] | None = None) -> bytes:
        self.target.unlink(missing_ok=True)
        build_cache.build_or_fetch(self.folder, make_key or (lambda: key), self.target, self.compile)
        return self.target.read_bytes()


@pytest.fixture
def fake(tmp_path: Path) -> FakeBuild:
    return FakeBuild(tmp_path / "cache" / "build", tmp_path / "core.so")


def test_a_second_installation_of_the_same_sources_compiles_nothing(fake: FakeBuild, sources: Path) -> None:
    first = fake.install(build_cache.core_key(sources, FACTS, {}))
    elsewhere = sources.rename(sources.with_name("another"))  # a clone's path is no input of its core
    assert fake.install(build_cache.core_key(elsewhere, FACTS, {})) == first == b"core 1"
    assert fake.calls == 1


@pytest.mark.parametrize(
    "name", ["csrc/bindings/module.cpp", "csrc/base/isa.h", "CMakeLists.txt", "setup.py", "cuda_choice.py"]
)
def test_a_changed_byte_of_a_source_changes_the_key(fake: FakeBuild, sources: Path, name: str) -> None:
    before = build_cache.core_key(sources, FACTS, {})
    content = bytearray((sources / name).read_bytes())
    content[len(content) // 2] ^= 1
    (sources / name).write_bytes(content)
    after = build_cache.core_key(sources, FACTS, {})
    assert after != before
    assert fake.install(before) != fake.install(after)
    assert fake.calls == 2


def test_an_added_a_renamed_and_an_exchanged_source_change_the_key(sources: Path) -> None:
    def key() -> str:
        return build_cache.core_key(sources, FACTS, {})

    keys = [key()]
    (sources / "csrc/added.cpp").write_bytes(b"")
    keys.append(key())
    (sources / "csrc/added.cpp").rename(sources / "csrc/renamed.cpp")
    keys.append(key())
    (sources / "csrc/renamed.cpp").rename(sources / "csrc/cpu/renamed.cpp")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_compilers_and_options_change_the_key_and_other_variables_do_not(sources: Path) -> None:
    plain = build_cache.core_key(sources, FACTS, {})
    assert build_cache.core_key(sources, ["g++ 13.1.0", "cpython-311"], {}) != plain
    assert build_cache.core_key(sources, ["g++ 12.2.0", "cpython-313"], {}) != plain
    for name in ("CMAKE_ARGS", "CXX", "CXXFLAGS", "CUDACXX", "CMAKE_CUDA_COMPILER_LAUNCHER"):
        assert build_cache.core_key(sources, FACTS, {name: "-DSPECENGINE_CUDA=OFF"}) != plain
    assert build_cache.core_key(sources, FACTS, {"PATH": "/tmp/build-env/bin", "HOME": "/root"}) == plain


def test_the_versions_name_the_compiler_of_the_environment(tmp_path: Path) -> None:
    compiler = tmp_path / "c++-99"
    compiler.write_text("#!/bin/sh\necho c++ 99.1 $@\n")
    compiler.chmod(0o755)
    assert f"{compiler} -m64: c++ 99.1 --version\n" in build_cache.versions({"CXX": f"{compiler} -m64"})


def test_sources_edited_during_a_build_leave_nothing_in_the_cache(fake: FakeBuild) -> None:
    keys = iter(["before", "after"])
    fake.install("", make_key=lambda: next(keys))
    assert fake.install("before") == b"core 2"


def test_a_damaged_core_is_compiled_again(fake: FakeBuild) -> None:
    fake.install("key")
    (cached,) = fake.folder.glob("*.so")
    cached.write_bytes(cached.read_bytes()[:-1])
    assert fake.install("key") == b"core 2"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="users are known by their numbers")
def test_the_core_of_another_user_is_not_taken(fake: FakeBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install("key")
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert fake.install("key") == b"core 2"


def test_the_cache_keeps_the_cores_that_were_used_last(fake: FakeBuild) -> None:
    for number in range(build_cache.KEPT):
        fake.install(f"key{number}")
        for cached in fake.folder.glob(f"key{number}-*"):
            os.utime(cached, (number, number))
    fake.install("key0")  # used again: key1 is the oldest now
    fake.install("another")
    assert len(list(fake.folder.iterdir())) == build_cache.KEPT
    calls = fake.calls
    fake.install("key0")
    assert fake.calls == calls
    fake.install("key1")
    assert fake.calls == calls + 1


def test_a_folder_that_cannot_be_written_costs_a_build_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    fake = FakeBuild(tmp_path / "file" / "build", tmp_path / "core.so")
    assert [fake.install("key"), fake.install("key")] == [b"core 1", b"core 2"]


def test_the_cache_is_where_the_users_caches_are_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_cache.cache_folder
    monkeypatch.setattr(Path, "home", lambda: Path("/home/user"))
    assert folder({}) == Path("/home/user/.cache/specengine/build")
    assert folder({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/specengine/build")
    assert folder({"XDG_CACHE_HOME": "/xdg", "SPECENGINE_CACHE": "/chosen"}) == Path("/chosen/build")
    assert folder({"SPECENGINE_CACHE": "/chosen", "SPECENGINE_BUILD_CACHE": "0"}) is None
    assert folder({"SPECENGINE_CACHE": "off"}) is None
    assert folder({"CXXFLAGS": "-O3 -march=native"}) is None
