"""P-EAGLE: what it drafts, and that no text changes."""

import pytest
import torch

from specengine import SamplingParams
from specengine.drafters import load_drafter
from tests.drafters.eagle_bench import PROMPTS, Bench
from tests.drafters.eagle_bench import spec_of as eagle_spec_of
from tests.drafters.one_pass_trees import TREES
from tests.drafters.p_eagle_files import LAYOUTS, MASK, MaskReading, mask_reading, mask_state, write_p_eagle
from tests.engines import ids, tiny_engine, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=3)
COMMITTED = ([[1, 2, 3], [8], [9, 9], [30, 31]], [[6], [2, 8, 5], [7], [1]], [[5, 4, 3, 2], [1], [2], [3]])
CHAIN = "tree=chain,length=4,adaptive=false"


def spec_of(folder, name="vllm"):
    return f"p-eagle:{write_p_eagle(folder / 'draft', name)}"


def check_chains(bench, reading):
    """Every request's chain is the reading's, in every cycle."""
    for committed in (None, *COMMITTED):
        if committed:
            bench.commit(committed)
        for request, tree in zip(bench.requests, bench.drafter.draft(bench.requests).trees, strict=True):
            known = len(request.tokens) - 1
            if not known:
                assert tree.parents == [-1]
                continue
            states = bench.hidden_states(request.tokens)
            fused = reading.fused(states.last[:known], list(states.at_layers[:known].unbind(1)))
            best = reading.draft_logits(fused, request.tokens[1:], 4).argmax(-1)
            assert tree.tokens[1:] == reading.tokens()[best].tolist() and tree.parents == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_drafts_the_chain_of_a_straight_line_reading(tmp_path, name):
    check_chains(Bench(spec_of(tmp_path, name), PROMPTS, CHAIN), mask_reading(name))


class NoState(MaskReading):
    """Masks without a state of their own."""

    def masked(self):
        return torch.zeros_like(super().masked())


class PastFc(MaskReading):
    """The state of masks enters as it is stored."""

    def masked(self):
        return self.state["mask_hidden"][0, :, :64]


class LastState(MaskReading):
    """Masks have the last pair's hidden state."""

    def draft_logits(self, fused, tokens, length):
        self.masked = lambda: fused[-1:]
        return super().draft_logits(fused, tokens, length)


@pytest.mark.parametrize("kind", [NoState, PastFc, LastState])
def test_another_state_of_masks_would_be_noticed(tmp_path, kind):
    with pytest.raises(AssertionError):
        check_chains(Bench(spec_of(tmp_path), PROMPTS, CHAIN), mask_reading(kind=kind))


def test_another_residual_stream_would_be_noticed(tmp_path):
    with pytest.raises(AssertionError):
        check_chains(Bench(spec_of(tmp_path), PROMPTS, CHAIN), mask_reading(norm_before_residual=True))


@pytest.mark.quick(4)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
def test_no_token_changes(tmp_path, options, params, batch):
    engine = tiny_engine(f"{spec_of(tmp_path)},{options}", max_batch_size=batch)
    outputs = engine.generate(PROMPTS, params)
    assert ids(outputs) == ids(tiny_engine("none").generate(PROMPTS, params))
    assert engine.cache.pages_in_use == 0
    if "adaptive=false" in options:
        assert all(output.stats.acceptance_by_depth for output in outputs)


def test_it_is_a_part_of_combine(tmp_path):
    spec = f"combine:prompt_lookup+{spec_of(tmp_path)};length=3,adaptive=false"
    outputs = tiny_engine(spec).generate(PROMPTS, GREEDY)
    assert ids(outputs) == ids(tiny_engine("none").generate(PROMPTS, GREEDY))
    assert sum(output.stats.sources["p_eagle"].drafted for output in outputs) > 0


REFUSED = {
    "no mask token": ({"pard_token": None}, {}, "'pard_token' is missing; expected it, ptd_token_id or mask_token_id"),
    "two mask tokens": ({"mask_token_id": 3}, {}, f"'mask_token_id' is 3, but 'pard_token' is {MASK}"),
    "mask token": ({"pard_token": 320}, {}, "'pard_token' must be a token from 0 to 319, got 320"),
    "level by level": ({"parallel_drafting": False}, {}, "'parallel_drafting' contradicts the tensors"),
    "columns": ({}, mask_state(2), r"'mask_hidden' has shape \(1, 1, 128\), expected \(1, 1, 192\)"),
    "no fc": ({}, {"fc.weight": None}, "'fc.weight' is missing, which the hidden states of masks pass"),
    "EAGLE-3": ({}, {"mask_hidden": None}, r"'mask_hidden' is missing; is this EAGLE-3 \(eagle3:PATH\)"),
}


@pytest.mark.parametrize("changes, tensors, message", REFUSED.values(), ids=REFUSED)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path, changes, tensors, message):
    folder = write_p_eagle(tmp_path / "draft", tensors=tensors, **changes)
    with pytest.raises(ValueError, match=f"^drafter: .*{message}"):
        load_drafter(f"p-eagle:{folder}", tiny_model().target)


@pytest.mark.parametrize("other", ["eagle", "eagle3"])
def test_other_kinds_of_eagle_name_the_right_drafter(tmp_path, other):
    with pytest.raises(ValueError, match="is a P-EAGLE drafter; use p-eagle:PATH"):
        load_drafter(spec_of(tmp_path).replace("p-eagle", other), tiny_model().target)
    with pytest.raises(ValueError, match=r"is this EAGLE-3 \(eagle3:PATH\)"):
        load_drafter(eagle_spec_of(tmp_path).replace("eagle3:", "p-eagle:"), tiny_model().target)
    with pytest.raises(ValueError, match="p-eagle:PATH takes a P-EAGLE checkpoint"):
        load_drafter("p-eagle", tiny_model().target)
