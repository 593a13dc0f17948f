"""The drafter in a GGUF file: it drafts what the same weights draft from a folder."""

import dataclasses

import gguf
import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.drafters import best_drafter, load_drafter
from specengine.models.checkpoint import RandomCheckpoint, open_checkpoint
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from specengine.ops import native
from tests.drafters.eagle_bench import PROMPTS, Bench
from tests.drafters.mtp_files import converted, mtp_state, write_mtp
from tests.engines import ids, tiny_model
from tests.models.hybrid_files import write_hybrid_gguf

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
CPU = torch.device("cpu")
TARGETS = ("tiny-qwen3.5", "tiny-qwen3.5-moe")
COMMITTED = ([[1, 2, 3], [8], [9, 9], [30, 31]], [[6], [2, 8, 5], [7], [1]])
TREE = "nodes=24,levels=4,top_k=4,adaptive=false"


def state_of(preset):
    torch.manual_seed(7)
    return mtp_state(PRESETS[preset], PRESETS[preset].moe)


def file_of(path, preset, extra, **options):
    return write_hybrid_gguf(path, RandomCheckpoint(PRESETS[preset]), extra, **options)


def extra_of(preset, kind=None):
    return converted(state_of(preset), PRESETS[preset].num_layers, kind)


def drafts_of(spec, preset):
    """The tree of every request and the logits of every pass over several cycles."""
    bench = Bench(spec, PROMPTS, TREE, tiny_model(f"random:{preset}").target)
    network, drafts = bench.drafter.network, []
    logits, bench.drafter.native = network.logits, None  # the passes are to be seen one by one
    for committed in (None, *COMMITTED):
        if committed:
            bench.commit(committed)
        seen = []
        network.logits = lambda read, seen=seen: seen.append(logits(read)) or seen[-1]
        trees = [(tree.tokens, tree.parents) for tree in bench.drafter.draft(bench.requests).trees]
        drafts.append((trees, torch.cat(seen).tolist()))
    return drafts


def assert_same_tokens(path):
    """Texts of a model in a file are those of plain decoding, with its own drafter."""
    target = load_transformer(open_checkpoint(path), "auto", CPU)
    model = dataclasses.replace(tiny_model("random:tiny-qwen3.5"), target=target)
    for params in (SamplingParams(max_new_tokens=16), SamplingParams(max_new_tokens=16, temperature=0.8, seed=3)):
        plain, drafted = (Engine(model, drafter=spec).generate(PROMPTS, params) for spec in ("none", f"mtp,{TREE}"))
        assert ids(drafted) == ids(plain)
        assert all(output.stats.acceptance_by_depth for output in drafted)


@pytest.mark.quick(1)
@pytest.mark.parametrize("alone", [False, True], ids=["behind a model", "alone"])
@pytest.mark.parametrize("preset", TARGETS)
def test_it_drafts_the_trees_of_the_same_weights_in_a_folder(tmp_path, preset, alone):
    folder = write_mtp(tmp_path / "mtp", state_of(preset))
    path = file_of(tmp_path / "m.gguf", preset, extra_of(preset), drafter_alone=alone)
    assert drafts_of(f"mtp:{path}", preset) == drafts_of(f"mtp:{folder}", preset)


@pytest.mark.parametrize("part", ["enorm", "hnorm", "shared_head_norm", "attn_norm", "attn_q_norm"])
def test_a_norm_without_the_one_that_converters_add_would_be_noticed(tmp_path, part):
    preset = "tiny-qwen3.5"
    folder = write_mtp(tmp_path / "mtp", state_of(preset))
    extra = [(name, value - 1 if f".{part}." in name else value) for name, value in extra_of(preset)]
    path = file_of(tmp_path / "m.gguf", preset, extra)
    assert drafts_of(f"mtp:{path}", preset) != drafts_of(f"mtp:{folder}", preset)


@pytest.mark.parametrize("preset", TARGETS)
def test_a_target_from_the_file_drafts_with_it_and_no_token_changes(tmp_path, preset):
    path = file_of(tmp_path / "m.gguf", preset, extra_of(preset))
    target = load_transformer(open_checkpoint(path), "float32", CPU)
    assert (best_drafter(target).name, best_drafter(target).path) == ("combine", "prompt_lookup+mtp")
    assert_same_tokens(path)


def test_auto_is_prompt_lookup_for_a_file_without_it(tmp_path):
    target = load_transformer(open_checkpoint(file_of(tmp_path / "m.gguf", "tiny-qwen3.5", ())), "float32", CPU)
    assert best_drafter(target).name == "prompt_lookup"
    with pytest.raises(ValueError, match=r"^drafter: mtp: .*m.gguf has no tensors mtp.* or blk.N.nextn.*; expected"):
        load_drafter("mtp", target)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantised_matrices_keep_their_codes(tmp_path, kind):
    preset, stored = "tiny-qwen3.5", gguf.GGMLQuantizationType[kind]
    extra = extra_of(preset, stored)
    path = file_of(tmp_path / "m.gguf", preset, extra)
    network = load_drafter("mtp", load_transformer(open_checkpoint(path), "auto", CPU)).network
    values = {name.split(".", 2)[2]: value.numpy() for name, value, *_ in extra}
    for projection, parts in (
        (network.fc, ["nextn.eh_proj.weight"]),
        (network.layers[0].gate_up, ["ffn_gate.weight", "ffn_up.weight"]),
        (network.layers[0].down, ["ffn_down.weight"]),
    ):
        blocks = torch.cat([torch.from_numpy(gguf.quants.quantize(values[part], stored)) for part in parts])
        (weight,) = projection.weights
        expected = native.empty_weight(len(blocks), values[parts[0]].shape[1], weight.format, CPU)
        native.pack_blocks(blocks, expected, 0, kind)
        assert torch.equal(weight.data, expected.data)
    assert_same_tokens(path)


REFUSED = {
    "missing": (lambda extra: [each for each in extra if "hnorm" not in each[0]], "'mtp.pre_fc_norm_hidden.weight' is"),
    "own embedding": (
        lambda extra: [*extra, ("blk.8.nextn.embed_tokens.weight", torch.ones(260, 64))],
        "'mtp.layers.0.nextn.embed_tokens.weight' is unexpected; expected one layer",
    ),
    "two layers": (
        lambda extra: [*extra, ("blk.9.nextn.eh_proj.weight", torch.ones(64, 128))],
        "'mtp.layers.1.nextn.eh_proj.weight' is unexpected; expected one layer",
    ),
    "size": (
        lambda extra: [(name, value[..., :32] if "eh_proj" in name else value) for name, value in extra],
        r"'mtp.fc.weight' has shape \(64, 32\), expected \(64, 128\)",
    ),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_a_file_that_does_not_fit_is_refused_by_the_name_of_its_tensor(tmp_path, change, message):
    path = file_of(tmp_path / "m.gguf", "tiny-qwen3.5", change(extra_of("tiny-qwen3.5")))
    with pytest.raises(ValueError, match=f"^drafter: mtp: .*{message}"):
        load_drafter(f"mtp:{path}", tiny_model("random:tiny-qwen3.5").target)
