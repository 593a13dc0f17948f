"""FastEagle's network in plain PyTorch: N cascaded layers, and the parts that the paper does not have."""

from __future__ import annotations

import torch
from torch import nn

from specengine.train.objectives.eagle3 import MidLayer
from specengine.train.objectives.llama_layer import DecoderLayer, LayerShape, RMSNorm


class EntryLayer(MidLayer):
    """EAGLE-3's layer as the first one: it reads the normed embedding beside the normed fused hidden states."""

    def forward(self, x: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: the fused hidden states [B, T, hidden].  embedded: [B, T, hidden], of the next tokens."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1)
        x = x + self.self_attn(both, positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class FastEagleNetwork(nn.Module):
    """FastEagle's network.

    fused: number of hidden states of a position to fuse; with the entry `sum` each has a norm, because their scales
    differ twentyfold.
    concat: the first layer is EAGLE-3's, and its input has no norms.
    head: rows V' of a head of its own; 0: the target's head reads the states.
    markov: rank of a bigram of the token above, of V' tokens; 0: there is none.
    """

    tap_scale: torch.Tensor  # of each fused hidden state with `concat`

    def __init__(
        self,
        shape: LayerShape,
        levels: int,
        fused: int,
        *,
        parallel: bool = False,
        norm: bool = True,
        concat: LayerShape | None = None,
        head: int = 0,
        markov: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc_features = nn.Linear(fused * size, size, bias=False)
        self.concat = concat is not None
        if concat is None:
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(fused))
            self.fc_input = nn.Linear(2 * size, size, bias=False)
            first: nn.Module = DecoderLayer(shape)
        else:
            # fc_features reads hidden states divided by this: they grow by an order of magnitude through the target
            self.register_buffer("tap_scale", torch.ones(fused))
            first = EntryLayer(concat)
        self.layers = nn.ModuleList([first, *(DecoderLayer(shape) for _ in range(levels - 1))])
        self.norm = RMSNorm(size, eps) if norm else nn.Identity()
        self.lm_head = nn.Linear(size, head, bias=False) if head else None
        rows, rank = markov
        self.markov_w1 = nn.Embedding(rows, rank) if rank else None
        self.markov_w2 = nn.Linear(rank, rows, bias=False) if rank else None
        self.parallel = parallel

    def forward(self, at_layers: torch.Tensor, embedded: torch.Tensor) -> list[torch.Tensor]:
        """Predicts N x [B, T, hidden].

        at_layers: [B, T, fused, hidden].  embedded: [B, T, hidden], the embeddings of the next tokens.
        """
        positions = torch.arange(at_layers.shape[1], device=at_layers.device)
        if self.concat:
            x = self.fc_features((at_layers / self.tap_scale[:, None]).flatten(-2)).float()
            x = self.layers[0](x, embedded, positions)
        else:
            normed = torch.cat([norm(at_layers[:, :, i]) for i, norm in enumerate(self.fc_norm)], -1)
            entry = self.fc_input(torch.cat([self.fc_features(normed), embedded], -1)).float()
            x = self.layers[0](entry, positions)
        states = [self.norm(x)]
        for layer in self.layers[1:]:
            x = layer(entry if self.parallel else x, positions)
            states.append(self.norm(x))
        return states
