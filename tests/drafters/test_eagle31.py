"""EAGLE-3.1: three toggles, each decided by tensors and keys of config.json."""

import pytest
import torch

from specengine.drafters import load_drafter
from tests.drafters.eagle_bench import LAYOUTS, PROMPTS, Bench, check_against, reading_of
from tests.drafters.eagle_files import CONFIG, HIDDEN, eagle3_state, write_drafter
from tests.engines import tiny_model

EACH = {f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in range(3)}
ALL = {"input_norm.weight": torch.ones(3 * HIDDEN)}


@pytest.mark.parametrize("name, key", [("a normed output", False), ("a norm per feature alone", True)])
def test_the_wrong_output_fed_back_would_be_noticed(tmp_path, name, key):
    drafter, config, state = LAYOUTS[name]
    bench = Bench(f"{drafter}:{write_drafter(tmp_path / 'draft', config, state)}", PROMPTS)
    check_against(reading_of(drafter, config, state), bench)
    bench.commit([[1, 2, 3], [8], [9, 9], [30, 31]])
    with pytest.raises(AssertionError):
        check_against(reading_of(drafter, config | {"norm_output": key}, state), bench)


CONTRADICTIONS = {
    "norms denied": ({"fc_norm": False}, EACH, "'fc_norm' contradicts the tensors: 'fc_norm.0.weight' is there"),
    "norms promised": ({"fc_norm": True}, {}, "'fc_norm' contradicts the tensors: 'fc_norm.0.weight' is missing"),
    "old key": ({"use_aux_norm": True}, {}, "'use_aux_norm' contradicts the tensors: 'fc_norm.0.weight' is missing"),
    "norm denied": (
        {"norm_before_fc": False},
        ALL,
        "'norm_before_fc' contradicts the tensors: 'input_norm.weight' is there",
    ),
    "norm promised": (
        {"norm_before_fc": True},
        {},
        "'norm_before_fc' contradicts the tensors: 'input_norm.weight' is missing",
    ),
    "both": ({}, EACH | ALL, r"has tensors 'fc_norm.\*' and 'input_norm.weight'; expected norms of one kind"),
    "a norm is missing": ({}, {"fc_norm.0.weight": torch.ones(HIDDEN)}, "'fc_norm.1.weight' is missing"),
    "the first is missing": ({}, {"fc_norm.2.weight": torch.ones(HIDDEN)}, "'fc_norm.0.weight' is missing"),
    "one too many": ({}, EACH | {"fc_norm.3.weight": torch.ones(HIDDEN)}, "'fc_norm.3.weight' is unexpected"),
    "size": ({}, EACH | {"fc_norm.1.weight": torch.ones(3)}, r"'fc_norm.1.weight' has shape \(3,\), expected \(64,\)"),
    "layers": ({"num_aux_hidden_states": 2}, {}, "'num_aux_hidden_states' is 2, but 3 layers are read"),
    "no truth value": ({"norm_output": "no"}, {}, "'norm_output' must be of type bool, got 'no'"),
}


@pytest.mark.parametrize("fields, tensors, message", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_toggle_that_contradicts_the_tensors_is_refused(tmp_path, fields, tensors, message):
    folder = write_drafter(tmp_path / "draft", CONFIG | fields, eagle3_state(CONFIG) | tensors)
    with pytest.raises(ValueError, match=message):
        load_drafter(f"eagle3:{folder}", tiny_model().target)
