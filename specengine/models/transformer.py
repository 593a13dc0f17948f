"""The one transformer: LLaMA, Vicuna, Mistral, Qwen2, Qwen3 and every model of their shape.

A pass reads the rows of a TreeBatch and writes their keys and values to the cache behind the prefix. It returns hidden
states, and logits or greedy tokens, of every row. Prefill chunks, roots and trees take the same path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specengine._C import PAGE_SIZE
from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.cache.page_pool import page_bytes
from specengine.cache.state_memory import StateMemory
from specengine.cache.state_pool import StatePool, fixed_slots
from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import Checkpoint
from specengine.models.checkpoint_base import ENDS, expected_tensors
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.hidden_states import HiddenStates
from specengine.models.rope import RopeTables
from specengine.models.weights import ModelWeights, WeightLoader
from specengine.ops import Ops, ops_for
from specengine.ops.decoder import Rows
from specengine.ops.gated_delta.matrices import NO_STATES
from specengine.ops.lora.matrices import LoraLayer
from specengine.ops.prefill.chains import PromptChains
from specengine.ops.row_tools import divided
from specengine.ops.weight import Projection, Weight, dtype_of
from specengine.utils.cuda_graphs import DeviceGraphs
from specengine.utils.host_memory import is_host
from specengine.utils.kept_weights import KeptWeights
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class TargetOutput:
    """Scores and hidden states of the M rows of a pass.

    scores: logits float32 [M, V] or greedy tokens int32 [M].
    """

    scores: torch.Tensor
    hidden_states: HiddenStates


class Transformer:
    """Runs the passes of one model.

    rope: tables to share with another model of the same positions; None makes new ones.
    hidden_state_layers: passes also return the residual stream before these layers; the number of layers stands for
    the output of the last one. Raises ValueError for layers that do not rise or do not exist.
    lora: of the adapters that CacheBatch.adapters may name, by layer; empty: there are none.
    """

    tensor_parallel = 1  # processes that divide the layers among them

    def __init__(
        self,
        weights: ModelWeights,
        device: torch.device,
        ops: Ops,
        *,
        rope: RopeTables | None = None,
        hidden_state_layers: Sequence[int] = (),
        lora: Sequence[LoraLayer] = (),
    ) -> None:
        self.weights = weights
        self.config = weights.config
        self.device = device
        self.ops = ops
        self.final_norm = weights.final_norm
        self.head = weights.head
        self.formats = weights.formats
        self.hidden_state_layers = tuple(hidden_state_layers)
        self.lora = tuple(lora)
        self._embedding = weights.embedding
        self._layers = weights.layers
        self._decoder = self._new_decoder()
        self._rope = RopeTables(self.config, device) if rope is None else rope

    def _new_decoder(self) -> Callable[..., torch.Tensor]:
        layers = self.hidden_state_layers
        parts = self.config, self.embedding, self._layers, self.final_norm, layers
        own: dict[str, Any] = {"lora": self.lora, "multipliers": self.config.multipliers}
        if self.ops.on_device:
            own["out_dtype"] = self._out_dtype
        return self.ops.decoder(*parts, **own)

    @property
    def _out_dtype(self) -> torch.dtype:
        """The dtype of a pass's rows: that in which the head reads them, unless they are divided first."""
        divides = self.config.multipliers.logits_divisor != 1
        return self.ops.layer.dtype_for(self.head) if self.ops.on_device and not divides else torch.float32

    @property
    def graphs(self) -> DeviceGraphs:
        """What captures passes as graphs and waits for them."""
        return DeviceGraphs(self.device)

    def with_hidden_state_layers(self, layers: Sequence[int]) -> Transformer:
        """Returns the same model with other hidden_state_layers; both share all memory. Raises ValueError."""
        if tuple(layers) == self.hidden_state_layers:
            return self
        return self._sharing(layers, self.lora)

    def with_lora(self, lora: Sequence[LoraLayer]) -> Transformer:
        """Returns the same model with adapters, which CacheBatch.adapters chooses; both share all memory."""
        return self._sharing(self.hidden_state_layers, lora)

    def _sharing(self, layers: Sequence[int], lora: Sequence[LoraLayer]) -> Transformer:
        return Transformer(self.weights, self.device, self.ops, rope=self._rope, hidden_state_layers=layers, lora=lora)

    def first_layers(self, count: int) -> Transformer:
        """Returns the model that skips from layer `count` to the final norm and the head; both share all memory.

        Raises ValueError where the model has fewer layers, and for a hybrid, whose states a draft would change.
        """
        check_range("layers", count, 1, self.config.num_layers)
        if self.config.gated_delta is not None:
            raise ValueError("layers: a hybrid model cannot draft with its first layers")
        sliding = self.config.sliding_layers[:count]
        config = replace(
            self.config,
            num_layers=count,
            sliding_layers=sliding if any(sliding) else (),
            sliding_window=self.config.sliding_window if any(sliding) else None,
        )
        weights = replace(self.weights, config=config, layers=self._layers[:count])
        return Transformer(weights, self.device, self.ops, rope=self._rope)

    def with_layers(self, checkpoint: DraftCheckpoint, dtype: str) -> Transformer:
        """Returns a model of a checkpoint's layers and final norm between this model's embedding and head.

        Raises ValueError for a checkpoint of another width or vocabulary, and for missing or mis-shaped tensors.
        """
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(self.config, name), getattr(checkpoint.config, name)
            if ours != theirs:
                raise ValueError(f"{checkpoint.source}: {name} is {theirs}, the target's is {ours}")
        shapes = expected_tensors(checkpoint.config)
        checkpoint.expect_all({name: shape for name, shape in shapes.items() if name not in ENDS})
        loader = WeightLoader(checkpoint, self.draft_dtype(dtype), self.device, self.ops)
        return Transformer(loader.between(self._embedding, self.head), self.device, self.ops)

    def draft_dtype(self, dtype: str) -> str:
        """Returns the dtype of weights that draft for this model; `auto` becomes int8 or int4 where its layers are.

        Drafting waits for memory as a pass does, so float weights beside a quantised target would cost twice to four
        times their share. 5 and 6 bits count as 8, because they are stored so.
        """
        if dtype != "auto":
            return dtype
        nbytes = dict.fromkeys(("auto", "int8", "int4"), 0)
        for weight in (weight for layer in self._layers for weight in layer.weights):
            nbytes[dtype_of(weight.format)] += weight.data.nbytes
        return max(nbytes, key=nbytes.__getitem__)

    @property
    def failure(self) -> str | None:
        """The reason why the model can run no more passes, such as a dead process; None while it can."""
        return None

    @property
    def embedding(self) -> Weight:
        """Rows [V, hidden]."""
        return self._embedding.weights[0]

    def head_rows(self, tokens: torch.Tensor | None) -> Projection:
        """Copies the head's rows of some tokens, int32 [Vd], for a drafter; None returns the whole head.

        The copy has the head's own format, but 4 bits beside layers of 4 bits.
        """
        if tokens is None:
            return self.head
        (whole,), bias = self.head.weights, self.head.bias
        rows = torch.empty(len(tokens), self.config.hidden_size, device=self.device)
        self.ops.layer.gather_rows(whole, tokens, rows)
        form = whole.format
        if dtype_of(form) != "auto":
            form = "q4_min" if self.draft_dtype("auto") == "int4" else "q8"
        part = self.ops.empty_weight(*rows.shape, form, self.device)
        self.ops.pack_linear(rows, part, 0)
        return Projection((part,), None if bias is None else bias[tokens.long()])

    @property
    def cache_dtype(self) -> torch.dtype:
        """float32 if any weight is float32, else a half type: its rounding is below that of such weights."""
        if "float32" in self.formats:
            return torch.float32
        return torch.bfloat16 if "bfloat16" in self.formats else torch.float16

    def new_cache(self, pages: int | None = None, requests: int | None = None) -> KVCache:
        """Makes an empty cache for this model.

        pages: of a fixed pool.  requests: that a hybrid's fixed pool of states has slots for.
        None: on the CPU an open pool, on a GPU what one text as long as the context needs, in up to eight requests.
        """
        c = self.config
        if not is_host(self.device):
            pages = -(-c.max_position // PAGE_SIZE) if pages is None else pages
            requests = 8 if requests is None else requests
        states = None
        if c.gated_delta is not None:
            slots = None if requests is None else fixed_slots(requests)
            states = StatePool(StateMemory(c.gated_delta, self.device, slots), requests)
        return KVCache(c.attention_layers, c.num_kv_heads, c.head_dim, self.cache_dtype, self.device, pages, states)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of a cache on one device."""
        c = self.config
        return page_bytes((c.attention_layers, c.num_kv_heads, c.head_dim), self.cache_dtype)

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        self._rope.ensure(count)

    @property
    def projections(self) -> list[Projection]:
        """Every linear layer of a pass, without those of experts."""
        return [self.head, *(product for layer in self._layers for product in layer.projections)]

    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of one row reads; of experts those that it is sent to."""
        routers = sum(layer.moe.router.nbytes for layer in self._layers if layer.moe is not None)
        return sum(layer.nbytes for layer in self.projections) + routers + self.expert_bytes()

    def expert_bytes(self) -> int:
        """Bytes of experts that a pass of one row reads."""
        moes = (layer.moe for layer in self._layers if layer.moe is not None)
        return sum(moe.nbytes * moe.per_token // moe.experts for moe in moes)

    def tune(self, others: Sequence[Projection] = ()) -> None:
        """Measures the fastest kernel for each of its projections and of `others`, where the ops offer several.

        It must not run while a CUDA graph is captured.
        """
        if self.ops.tune is not None:
            for layer in [*self.projections, *others]:
                self.ops.tune(layer)

    def forward(self, tree: TreeBatch, cache: KVCache, batch: CacheBatch, greedy: bool = False) -> TargetOutput:
        """Computes hidden states and logits of every row.

        greedy: scores are the most likely tokens instead of logits; -1 where a row has none.
        """
        hidden_states = self.hidden_states(tree, cache, batch)
        score = self.likeliest if greedy else self.logits
        return TargetOutput(score(hidden_states.normed), hidden_states)

    def logits(self, hidden_states: torch.Tensor, masks: torch.Tensor | None = None) -> torch.Tensor:
        """Computes logits float32 [M, V] of hidden states [M, hidden].

        masks: int32 [M, ceil(V / 32)], the tokens that are read; others may have any logit. None: all.
        """
        return self.ops.linear(self._head_inputs(hidden_states), self.head, masks=masks)

    def likeliest(self, hidden_states: torch.Tensor, masks: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the most likely tokens int32 [M] of hidden states [M, hidden]; -1 where a row has none.

        masks: int32 [M, ceil(V / 32)], the tokens that each row allows; None: all.
        """
        return self.ops.linear_argmax(self._head_inputs(hidden_states), self.head, masks=masks)

    def _head_inputs(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Divides the rows whose logits are divided. Greedy tokens read these rows too, so that they tie alike."""
        divisor = self.config.multipliers.logits_divisor
        return hidden_states if divisor == 1 else divided(hidden_states, divisor)

    def hidden(self, tree: Rows, cache: KVCache, batch: CacheBatch, first_node: int = 0) -> torch.Tensor:
        """Computes the last hidden states alone, [M, hidden], as the head reads them.  Arguments: see hidden_states."""
        return self.hidden_states(tree, cache, batch, first_node).normed

    def hidden_states(self, tree: Rows, cache: KVCache, batch: CacheBatch, first_node: int = 0) -> HiddenStates:
        """Computes hidden states of every row, without logits.

        Keys and values of row r go to slot length + node index of its request.
        first_node: the number of each request's first row; the rows before it were passed already.
        """
        shape = (len(tree.tokens), len(self.hidden_state_layers), self.config.hidden_size)
        at_layers = torch.empty(shape, device=self.device) if self.hidden_state_layers else None
        place = (cache.k, cache.v, batch.block_table, batch.lengths)
        counted = self.config.moe is not None and not self.ops.on_device
        experts = torch.zeros(self.config.num_layers, dtype=torch.int32) if counted else None
        states = NO_STATES
        if cache.states is not None and batch.states is not None:
            states = cache.states.of_pass(batch.states, len(tree.tokens), tree.ancestors is not None)
        chosen: dict[str, Any] = {"adapters": batch.adapters, "experts": experts}
        if first_node:
            chosen["first_node"] = first_node
        if self.ops.on_device and isinstance(tree, TreeBatch):
            chosen["chains"] = chains_of(tree, batch)
        normed = self._decoder(tree, *place, *self._rope.cos_sin, at_layers, **chosen, states=states)
        return HiddenStates(normed, at_layers, experts)


def chains_of(tree: TreeBatch, batch: CacheBatch) -> PromptChains | None:
    """Returns the chains of a batch where the host knows them: their attention asks the device for nothing then."""
    if tree.ancestors is not None or tree.starts is None or batch.host is None:
        return None
    return PromptChains.of(tree.starts, batch.host.tolist())


def load_transformer(checkpoint: Checkpoint, dtype: str, device: torch.device, ops: Ops | None = None) -> Transformer:
    """Reads a checkpoint's weights into a model. dtype: a name of models.weights.DTYPES. Raises ValueError."""
    ops = ops or ops_for(device)
    kept = KeptWeights.of_model(checkpoint.source, dtype, checkpoint.drafts) if is_host(device) else None
    return Transformer(WeightLoader(checkpoint, dtype, device, ops, kept).model(), device, ops)
