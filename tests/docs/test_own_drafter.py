"""The drafter of docs/adding-your-own.md as a file of its own, found by its name."""

import pytest

from specengine import SamplingParams, drafters
from specengine.drafters import drafter_names
from tests.docs.pages import ROOT, Page
from tests.engines import ids, tiny_engine


@pytest.fixture
def bigram(tmp_path, monkeypatch):
    """Its file, beside the other drafters."""
    code = Page(ROOT / "docs" / "adding-your-own.md").blocks[0].code
    (tmp_path / "bigram.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    monkeypatch.setitem(drafters.DRAFTERS, "bigram", "bigram:Bigram")


@pytest.mark.parametrize("rule", ["match", "rejection", "block", "traversal", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_is_found_by_name_and_serves_rules_that_need_nothing(bigram, rule, temperature):
    assert "bigram" in drafter_names()
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5] * 6, [9]]
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=3)
    engine = tiny_engine("bigram,length=4", rule=rule, max_batch_size=2)
    outputs = engine.generate(prompts, params)
    if temperature == 0:  # the random model's draws repeat nothing
        assert sum(output.stats.cycles for output in outputs) < sum(map(len, ids(outputs)))
    if rule == "match":
        assert ids(outputs) == ids(tiny_engine("none").generate(prompts, params))


def test_its_options_are_checked(bigram):
    for wrong in ("bigram,length=0", "bigram,depth=3"):
        with pytest.raises(ValueError, match="bigram"):
            tiny_engine(wrong)
