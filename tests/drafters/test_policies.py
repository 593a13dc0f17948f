"""What a drafter's policy has learned is found again by the next process, for the same files only."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specengine import Engine
from specengine.draft_policy.expert_reads import EXPONENT
from specengine.drafters import load_drafter, policy_file, shipped
from specengine.tensor_parallel.loading import load_model
from specengine.utils.measurement_cache import measurement_path
from tests.drafters.medusa_files import heads_state, write
from tests.engines import GREEDY, tiny_model

LEARNED = {"gains": [1.5]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Remembers in a folder of the test."""
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(policy_file, "measurement_path", measurement_path)
    return tmp_path / "cache"


def file_of(*drafters, target=None):
    return policy_file.PolicyFile(target or tiny_model().target, drafters)


def test_what_was_learned_of_a_checkpoint_is_not_used_for_the_one_that_replaces_it(tmp_path, cache):
    folder, target = write(tmp_path / "heads", heads_state()), tiny_model().target
    drafter = load_drafter(f"medusa:{folder}", target)
    file_of(drafter).write(LEARNED)
    assert file_of(load_drafter(f"medusa:{folder}", target)).read()["gains"] == [1.5]
    write(folder, heads_state(seed=1))
    retrained = file_of(load_drafter(f"medusa:{folder}", target))
    assert retrained.read() == {}
    retrained.write({"gains": [2.5]})
    assert len([*(cache / "policy").iterdir()]) == 1  # the stale file is replaced


@pytest.mark.parametrize("part", [0, 1])
def test_the_files_of_all_parts_count_and_those_that_come_with_the_package_too(tmp_path, monkeypatch, part):
    text = tmp_path / "corpus"
    monkeypatch.setattr(policy_file, "shipped_folder", lambda name, target: tmp_path if name == "eagle3" else None)
    text.write_text("one")
    parts = [
        SimpleNamespace(name=name, path=path, config="") for name, path in (("suffix", str(text)), ("eagle3", None))
    ]
    file_of(*parts).write(LEARNED)
    assert file_of(*parts).read()["gains"] == [1.5]
    changed = (text, tmp_path / "model.safetensors")[part]
    changed.write_text("two")
    os.utime(changed, ns=(1, 1))
    assert file_of(*parts).read() == {}


def test_another_model_of_the_same_shape_begins_anew():
    own, other = (load_model("random:tiny-llama", device="cpu").target for _ in range(2))
    drafter = SimpleNamespace(name="prompt_lookup", path=None, config="")
    file_of(drafter, target=own).write(LEARNED)
    other.final_norm = torch.full_like(other.final_norm, 2.0)
    assert file_of(drafter, target=own).read() and not file_of(drafter, target=other).read()
    assert shipped.fingerprint(own) != shipped.fingerprint(other)


def test_what_passes_read_of_a_mixture_is_learned_from_them_and_remembered():
    model = tiny_model("random:tiny-qwen3-moe")
    engine = Engine(model, drafter="prompt_lookup")
    engine.generate([[5, 6, 7] * 12, [9] * 30], replace(GREEDY, max_new_tokens=40, ignore_eos=True))
    policy = engine.drafter.policy
    reads = policy.costs.experts
    assert (reads.experts, reads.per_token) == (16, 4) and 0 < reads.share < 1
    assert max(reads.passes) > 2 and reads.exponent != EXPONENT
    assert all(4 <= sums.experts / sums.passes <= min(16, 4 * rows) for rows, sums in reads.passes.items())
    learned = json.loads(json.dumps(policy_file.learned_of(policy)))
    again = load_drafter("prompt_lookup,nodes=8", model.target).policy  # another file
    policy_file.teach(again, {**learned, "exponent": "x"})
    assert again.costs.experts.exponent == EXPONENT and not again.costs.known
    policy_file.teach(again, learned)
    assert again.costs.experts.exponent == reads.exponent and again.costs.known
    dense = load_drafter("prompt_lookup", tiny_model().target).policy
    assert dense.costs.experts is None and "exponent" not in policy_file.learned_of(dense)
