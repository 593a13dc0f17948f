"""causal_attention: who serves it, and that the call to flash-attn means what the other path computes."""

import pytest
import torch

from specengine.ops.prefill import causal_attention as module
from specengine.ops.prefill.causal_attention import causal_attention


def tensors(rows, slots, dtype):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(rows, 4, 16, generator=generator)
    keys, values = (torch.randn(slots, 2, 16, generator=generator).to(dtype) for _ in range(2))
    return q, keys, values


def plain(q, keys, values, scale, window, sinks=None):
    """Row by row, from the definition, in float64."""
    rows, slots = len(q), len(keys)
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(rows):
        last = slots - rows + i
        seen = slice(max(0, last - window + 1) if window else 0, last + 1)
        for h in range(q.shape[1]):
            k, v = keys[seen, h // 2].double(), values[seen, h // 2].double()
            scores = k @ q[i, h].double() * scale
            scores = scores if sinks is None else torch.cat([scores, sinks[h : h + 1].double()])
            out[i, h] = scores.softmax(0)[: len(v)] @ v
    return out.float()


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize(("rows", "slots"), [(1, 1), (1, 9), (7, 7), (5, 30)])
def test_rows_see_what_came_before_them(rows, slots, window):
    q, keys, values = tensors(rows, slots, torch.float32)
    out = causal_attention(q, keys, values, 0.3, window)
    torch.testing.assert_close(out, plain(q, keys, values, 0.3, window), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 5])
def test_sinks_take_part_in_the_softmax_and_have_no_value(window, dtype):
    q, keys, values = tensors(7, 30, dtype)
    sinks = torch.tensor([-40.0, 0.0, 3.0, 40.0])
    out = causal_attention(q, keys, values, 0.3, window, sinks)
    torch.testing.assert_close(out, plain(q, keys, values, 0.3, window, sinks), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[:, 0], plain(q, keys, values, 0.3, window)[:, 0], rtol=1e-4, atol=1e-5)
    assert out[:, 3].abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "slots"), [(1, 1), (1, 9), (7, 7), (5, 30)])
def test_half_types_see_the_same_keys(rows, slots, dtype):
    q, keys, values = tensors(rows, slots, dtype)
    expected = plain(q.to(dtype).float(), keys, values, 0.3, 0)
    out = causal_attention(q, keys, values, 0.3, 0)
    assert out.dtype == torch.float32 and (out - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("window", [0, 5])
def test_flash_attention_is_asked_for_the_same_thing(monkeypatch, window):
    q, keys, values = tensors(70, 90, torch.bfloat16)

    def flash(q, k, v, softmax_scale, causal, window_size):  # its documented meaning: bottom-right causal, GQA
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and causal
        assert q.shape == (1, 70, 4, 16) and k.shape == v.shape == (1, 90, 2, 16)
        left, right = window_size
        assert right == 0
        return plain(q[0].float(), k[0], v[0], softmax_scale, left + 1 if left >= 0 else 0)[None].to(q.dtype)

    without = causal_attention(q, keys, values, 0.3, window)
    monkeypatch.setattr(module, "flash_attn_func", flash)
    monkeypatch.setattr(module, "_flash_serves", lambda q, keys: True)
    torch.testing.assert_close(causal_attention(q, keys, values, 0.3, window), without, rtol=0.05, atol=0.02)


def test_flash_attention_is_not_asked_on_the_cpu(monkeypatch):
    q, keys, values = tensors(70, 90, torch.bfloat16)
    monkeypatch.setattr(module, "flash_attn_func", None.__class__)  # would fail if called
    assert causal_attention(q, keys, values, 0.3, 0).shape == q.shape
