"""docs/files.md lists every source file, and no other."""

import importlib.util

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_files", ROOT / "docs" / "make_files.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def difference(script, text: str) -> dict[str, set[str]]:
    """The files that a page lacks, and those it lists although they do not exist."""
    listed = set(script.listed(text))
    real = {path.relative_to(ROOT).as_posix() for path in script.sources()}
    return {"missing": real - listed, "superfluous": listed - real}


def test_every_file_is_on_the_map_and_no_other(script):
    found = difference(script, script.PAGE.read_text(encoding="utf-8"))
    assert found == {"missing": set(), "superfluous": set()}, "run: python docs/make_files.py"


def test_every_file_has_a_line_of_its_own_that_says_something(script):
    text = script.PAGE.read_text(encoding="utf-8")
    assert len(list(script.listed(text))) == text.partition("\n## ")[2].count("\n- `")
    assert all(len(script.gloss(path)) > 10 for path in script.sources())


def test_a_file_that_comes_or_goes_is_noticed(script):
    text = script.PAGE.read_text(encoding="utf-8")
    gone = text.replace("- `scheduler.py`: ", "- `turnstile.py`: ")
    assert difference(script, gone) == {
        "missing": {"specengine/engine/scheduler.py"},
        "superfluous": {"specengine/engine/turnstile.py"},
    }
    assert difference(script, text.replace("- `api.py`: ", "- `api.py`:"))["missing"] == {"specengine/api.py"}


def test_the_gloss_is_the_first_sentence_of_the_head(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "ROOT", tmp_path)
    for name, text, gloss in (
        ("a.py", '"""One op. And more."""\n', "One op."),
        ("b.h", "// The walk, from\n// the root. Then\n#pragma once\n", "The walk, from the root."),
        ("c.sh", "#!/bin/sh\n# Runs all\n\nset -e\n", "Runs all."),
    ):
        (tmp_path / name).write_text(text)
        assert script.gloss(tmp_path / name) == gloss
    (tmp_path / "d.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"d\.py: no docstring"):
        script.gloss(tmp_path / "d.py")
