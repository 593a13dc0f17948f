"""A simulator from the build cache is the one of today's sources."""

from tests.simulator import build


def test_every_source_is_in_the_key_of_the_simulator(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    names = ["csrc/cuda/a.cu", "tests/simulator/csrc/sim/b.h", *build.build_cache.SCRIPTS]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    keys = [build._key()]
    for name in names:
        (tmp_path / name).write_text("2")
        keys.append(build._key())
    assert len(set(keys)) == len(names) + 1
    assert build._key() == keys[-1]
