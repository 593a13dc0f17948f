"""The network of a block drafter in plain PyTorch: layers whose slots see the target's hidden states as keys.

Row t of a dialogue gives a block: slot 0 holds token t + 1, the other slots hold the mask token. Slots see the context,
which are the target's fused hidden states of positions 0 .. t, and slots of their own block.
"""

from __future__ import annotations

import torch
from torch import nn

from specengine.train.objectives.llama_layer import MLP, Attention, LayerShape, RMSNorm


class BlockAttention(Attention):
    """Attention of the slots over the context and over their own block; queries and keys have norms."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def of_blocks(
        self, slots: torch.Tensor, rows: torch.Tensor, context: torch.Tensor, inside: torch.Tensor
    ) -> torch.Tensor:
        """Returns [R, b, C].

        slots: [R, b, C], normed.  rows: int64 [R], the row t of each block.  context: [T, C].
        inside: bool [b, b], the slots that a slot sees.
        """
        places = rows[:, None] + 1 + torch.arange(slots.shape[1], device=rows.device)
        positions = torch.arange(len(context), device=rows.device)
        q = self._turned(self.q_norm, self.q_proj(slots), places)  # [R, b, H, D]
        own_keys, keys = (
            self._turned(self.k_norm, self.k_proj(x), at) for x, at in ((slots, places), (context, positions))
        )
        own_values, values = (self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim)) for x in (slots, context))
        q = q.unflatten(2, (self.shape.num_kv_heads, -1)) * self.shape.head_dim**-0.5
        shared = torch.einsum("rbkgd,tkd->rbkgt", q, keys)
        shared = shared.masked_fill((positions > rows[:, None])[:, None, None, None], -torch.inf)
        own = torch.einsum("rbkgd,rckd->rbkgc", q, own_keys)
        own = own.masked_fill(~inside[:, None, None], -torch.inf)
        shares = torch.cat([shared, own], -1).float().softmax(-1).to(values.dtype)
        over, among = shares.split([len(context), slots.shape[1]], -1)
        mixed = torch.einsum("rbkgt,tkd->rbkgd", over, values) + torch.einsum("rbkgc,rckd->rbkgd", among, own_values)
        return self.o_proj(mixed.flatten(2))

    def _turned(self, norm: RMSNorm, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Norms heads and rotates them to positions [..]: [.., heads * D] becomes [.., heads, D]."""
        heads = norm(x.unflatten(-1, (-1, self.shape.head_dim)))
        flat = heads.flatten(0, -3)[:, :, None]  # at_positions turns [B, heads, T, D]
        return self.at_positions(flat, positions.flatten()[:, None]).view_as(heads)


class BlockLayer(nn.Module):
    """A decoder layer of slots."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor, rows: torch.Tensor, context: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """x: [R, b, C]. See BlockAttention."""
        x = x + self.self_attn.of_blocks(self.input_layernorm(x), rows, context, inside)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """What a slot's logits gain by the token above it: a bigram of low rank that starts as zero (DSpark)."""

    def __init__(self, tokens: int, rank: int, rows: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, rows, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """Guesses from a slot's state and the token above how likely the target accepts the slot's token (DSpark)."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.proj = nn.Linear(columns, 1)


class BlockNetwork(nn.Module):
    """The network under the names of published files.

    fused: hidden states of a position.  causal: a slot sees only slots before it, and itself.
    markov: (tokens, rank, rows of the head), or None.  confidence: whether there is a confidence head; it needs markov.
    """

    tap_scale: torch.Tensor  # fc reads hidden states divided by this, as EAGLE-3's

    def __init__(
        self,
        shape: LayerShape,
        layers: int,
        fused: int,
        *,
        causal: bool,
        markov: tuple[int, int, int] | None = None,
        confidence: bool = False,
    ) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(fused * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(layers))
        self.norm = RMSNorm(size, eps)
        self.markov_head = MarkovHead(*markov) if markov else None
        self.confidence_head = ConfidenceHead(size + markov[1]) if markov and confidence else None
        self.causal = causal
        self.register_buffer("tap_scale", torch.ones(fused))

    def forward(self, at_layers: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Computes the normed states of all slots [R, b, C].

        at_layers: [T, fused, C], of one dialogue.  slots: [R, b, C], embeddings.  rows: int64 [R], the row of a block.
        """
        context = self.hidden_norm(self.fc((at_layers / self.tap_scale[:, None]).flatten(-2)).float())
        inside = torch.ones(slots.shape[1], slots.shape[1], dtype=torch.bool, device=slots.device)
        inside = inside.tril() if self.causal else inside
        x = slots
        for layer in self.layers:
            x = layer(x, rows, context, inside)
        return self.norm(x)
