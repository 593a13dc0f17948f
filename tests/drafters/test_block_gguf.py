"""Block drafters in GGUF files draft what their folders draft."""

import pytest
import torch

from specengine.drafters import load_drafter
from tests.drafters.block_bench import CHAIN, bench_of, drafts
from tests.drafters.block_files import (
    BLOCK,
    DFLASH,
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    JETSPEC,
    VOCAB,
    backbone_state,
)
from tests.drafters.block_gguf import write_gguf
from tests.drafters.block_heads import DFLASH2, DSPARK, SIZES, dflash2_state, dspark_state
from tests.drafters.eagle_bench import PROMPTS, Bench
from tests.engines import tiny_model

KINDS = {
    "dflash": (DFLASH, lambda: backbone_state(SIZES), {}),
    "jetspec": (JETSPEC, lambda: backbone_state(SIZES), {"attention.causal": True}),
    "dspark": (DSPARK, dspark_state, {"has_confidence_head": True}),
    "dflash 2": (
        DFLASH2 | {"dflash_config": DFLASH2["dflash_config"] | {"input_embedding_scale": 1}},
        dflash2_state,
        {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 5}
        | {"logit_scale": 0.7, "final_logit_softcapping": 3.0, "sample_from_anchor": False},
    ),
    "dspark without a bias": (
        DSPARK,
        lambda: {**dspark_state(), "confidence_head.proj.bias": torch.zeros(1)},
        {"has_confidence_head": True, "attention.value_length": [DIM, DIM], "rope.dimension_count": DIM}
        | {"attention.head_count": [HEADS, HEADS], "feed_forward_length": [INNER, INNER]},
    ),
}


def trees(bench):
    return [(tree.tokens, tree.parents) for _, _, tree in drafts(bench)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_drafts_what_its_folder_drafts(tmp_path, kind):
    torch.manual_seed(7)
    config, make, facts = KINDS[kind]
    name, state = kind.split()[0], make()
    kept = {own: tensor for own, tensor in state.items() if "without" not in kind or "proj.bias" not in own}
    file = write_gguf(tmp_path / "drafter.gguf", kept, facts)
    ours = trees(Bench(f"{name}:{file}", PROMPTS, CHAIN))
    assert ours == trees(bench_of(name, tmp_path, config, state))
    assert max(len(tokens) for tokens, _ in ours) >= BLOCK


def test_tokens_of_a_smaller_vocabulary_are_the_target_s(tmp_path):
    torch.manual_seed(7)
    cut, state = torch.arange(0, 300, 3), backbone_state(SIZES)
    state["lm_head.weight"] = torch.randn(len(cut), HIDDEN)
    file = write_gguf(tmp_path / "drafter.gguf", state | {"d2t": cut})
    folder = bench_of("dflash", tmp_path, DFLASH, state | {"d2t": cut - torch.arange(len(cut))})
    assert trees(Bench(f"dflash:{file}", PROMPTS, CHAIN)) == trees(folder)


def test_other_files_are_refused_by_name(tmp_path):
    torch.manual_seed(7)
    state, target = backbone_state(SIZES), tiny_model().target
    other = write_gguf(tmp_path / "other.gguf", state, arch="llama")
    with pytest.raises(ValueError, match=r"^drafter: .*field 'general.architecture' must be dflash, got 'llama'"):
        load_drafter(f"dflash:{other}", target)
    mask = write_gguf(tmp_path / "mask.gguf", state, mask=VOCAB)
    with pytest.raises(ValueError, match=r"^drafter: \S*mask\.gguf: field 'mask_token_id' is 320, the target has 320"):
        load_drafter(f"dflash:{mask}", target)
    extra = write_gguf(tmp_path / "extra.gguf", state | {"blk.0.attn_sinks.weight": torch.zeros(HEADS)})
    with pytest.raises(ValueError, match=r"^drafter: .*sinks.* is unexpected"):
        load_drafter(f"dflash:{extra}", target)
    part = write_gguf(tmp_path / "part.gguf", state, {"rope.dimension_count": DIM // 2})
    with pytest.raises(ValueError, match=r"^drafter: .*field 'dflash.rope.dimension_count' is 8, must be"):
        load_drafter(f"dflash:{part}", target)
    with pytest.raises(FileNotFoundError, match=r"^drafter: "):
        load_drafter(f"dflash:{tmp_path / 'none.gguf'}", target)
