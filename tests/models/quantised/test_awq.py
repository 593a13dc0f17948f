"""AWQ checkpoints: words of eight shuffled outputs, or of eight inputs in order."""

import pytest
import torch

from specengine.models.checkpoint import open_checkpoint
from tests.models.quantised.packing import TINY, awq, check, grouped, packed_state, words, write

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
DOWN = "model.layers.1.mlp.down_proj.weight"


def test_awq_weights_read_as_what_was_packed(tmp_path):
    checkpoint = check(tmp_path, awq, AWQ)
    coding = checkpoint.tensors[DOWN].coding
    assert (coding.kind, coding.group, coding.zeros, coding.ordered) == ("int4", 64, True, False)
    assert checkpoint.tensors["lm_head.weight"].coding is None
    with pytest.raises(ValueError, match=r"'lm_head\.weight' has no codes"):
        checkpoint.read_coded("lm_head.weight", 0, 1)
    with pytest.raises(ValueError, match=r"rows \[0, 129\) are outside"):
        checkpoint.read_coded(DOWN, 0, 129)


def test_any_rows_can_be_read_though_words_hold_eight(tmp_path):
    stored, plain = packed_state(TINY, awq)
    checkpoint = open_checkpoint(write(tmp_path / "m", TINY, stored, AWQ))
    for start in range(17):
        for stop in range(start, 18):
            assert torch.equal(checkpoint.read_rows(DOWN, start, stop), plain[DOWN][start:stop])
            assert checkpoint.read_coded(DOWN, start, stop).codes.shape == (stop - start, 192)


def test_nibbles_in_the_order_of_other_formats_are_other_weights(tmp_path):
    def unshuffled(weight):
        tensors, values = awq(weight)
        codes, _, _, _ = grouped(weight, 4, 64)
        return {**tensors, "qweight": words(codes.T.contiguous(), 4)}, values

    stored, plain = packed_state(TINY, unshuffled)
    checkpoint = open_checkpoint(write(tmp_path / "m", TINY, stored, AWQ))
    assert not torch.allclose(checkpoint.read(DOWN), plain[DOWN])


def test_a_symmetric_file_may_leave_out_zero_points(tmp_path):
    def symmetric(weight):
        codes, _, scales, values = grouped(weight, 4, 64, symmetric=True)
        shuffled = codes.T.reshape(-1, 8)[:, (0, 2, 4, 6, 1, 3, 5, 7)].view(len(codes.T), -1)
        return {"qweight": words(shuffled, 4), "scales": scales.T}, values

    check(tmp_path, symmetric, {**AWQ, "zero_point": False})
    stored, _ = packed_state(TINY, symmetric)
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.down_proj\.qzeros' is missing"):
        open_checkpoint(write(tmp_path / "m", TINY, stored, AWQ))


def test_gemv_files_pack_inputs_in_order_and_pad_their_groups(tmp_path):
    def gemv(weight):
        codes, zeros, scales, values = grouped(weight, 4, 64)
        padded = torch.nn.functional.pad(scales, (0, 16 - scales.shape[1]))
        pad = torch.nn.functional.pad(words(zeros, 4), (0, 1))
        return {"qweight": words(codes, 4), "qzeros": pad, "scales": padded}, values

    check(tmp_path, gemv, {**AWQ, "version": "GEMV"})


@pytest.mark.parametrize("version", ["gemv_fast", "marlin", "llm-awq"])
def test_other_versions_are_refused_by_name(version, tmp_path):
    stored, _ = packed_state(TINY, awq)
    with pytest.raises(ValueError, match=f"'version' is '{version}', expected"):
        open_checkpoint(write(tmp_path / "m", TINY, stored, {**AWQ, "version": version}))
