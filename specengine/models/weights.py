"""Reads a checkpoint's tensors into packed weights, block by block: at most one block is in memory twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specengine.models.checkpoint import Checkpoint, expected_tensors
from specengine.models.config import ModelConfig, MoeConfig
from specengine.models.gated_delta.weights import IN_PROJECTIONS, gated_delta
from specengine.models.quantised.formats import WeightFormats
from specengine.ops import Ops
from specengine.ops.decoder import Layer
from specengine.ops.experts.moe import ExpertProjection, Moe
from specengine.ops.gated_delta.gated_delta import MAX_CUDA_DIM
from specengine.ops.weight import FLOAT_FORMATS, PACKED_BLOCKS, UNPACKED_BLOCKS, Projection, Weight
from specengine.utils.free_memory import free_memory
from specengine.utils.gated_delta_config import GatedDeltaConfig
from specengine.utils.host_memory import is_host
from specengine.utils.kept_weights import KeptWeights

# `auto` keeps the format of the checkpoint; `auto-float32` does so, and its codes multiply rows of floats on the CPU.
# int4 stores embedding and head in 8 bits, as GGUF files of that size do, and a drafter's head in 4: a level reads
# little else.
FLOAT_ROWS = "auto-float32"
DTYPES = ("auto", FLOAT_ROWS, *FLOAT_FORMATS, "int8", "int4")

_EXPERT_PARTS = (("gate_proj", "up_proj"), ("down_proj",))  # of the products of experts
_Run = tuple[int, Sequence[str]]  # the row of a weight where matrices begin, and their names
_STEP_BYTES = 8 << 20  # weights are read and packed in steps of about this size


@dataclass(frozen=True)
class ModelWeights:
    """Packed weights of one model.

    final_norm: float32 [hidden].  formats: the formats of its matrices, names of ops.weight.  source: the path or name
    of its checkpoint.
    """

    config: ModelConfig
    embedding: Projection
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: Projection
    formats: frozenset[str]
    source: str


class WeightLoader:
    """Reads and packs one checkpoint. formats: the formats of the weights that were read so far.

    kept: holds weights that were packed at an earlier start; None: there are none.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, device: torch.device, ops: Ops, kept: KeptWeights | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self.kept = kept or KeptWeights()
        self.dtype = "auto" if dtype == FLOAT_ROWS else dtype
        self.float_rows = dtype == FLOAT_ROWS
        self.device = device
        self.ops = ops
        self.formats: set[str] = set()
        self._formats = WeightFormats(checkpoint, self.dtype, self.float_rows, ops)

    def model(self) -> ModelWeights:
        """Reads the whole model.

        Raises ValueError, before it reads, if the device cannot run it or it is larger than the free memory.
        """
        config = self.checkpoint.config
        self._check_device()
        self._check_memory()
        embedding = self.linear("model.embed_tokens")
        layers = self.layers()
        final_norm = self.vector("model.norm.weight")
        head = embedding if config.tie_embeddings else self.linear("lm_head")
        parts = embedding, layers, final_norm, head, frozenset(self.formats)
        self.kept.finish()
        return ModelWeights(config, *parts, self.checkpoint.source)

    def between(self, embedding: Projection, head: Projection) -> ModelWeights:
        """Reads layers and final norm of a model whose embedding and head are another model's."""
        layers = self.layers()
        final_norm = self.vector("model.norm.weight")
        parts = embedding, layers, final_norm, head, frozenset(self.formats)
        return ModelWeights(self.checkpoint.config, *parts, self.checkpoint.source)

    def layers(self) -> tuple[Layer, ...]:
        """Reads all decoder layers."""
        return tuple(self.layer(i) for i in range(self.checkpoint.config.num_layers))

    def layer(self, index: int) -> Layer:
        """Reads one decoder layer."""
        config = self.checkpoint.config
        window, moe, delta = config.layer_window(index) or 0, config.layer_moe(index), config.layer_gated_delta(index)
        return self.layer_at(f"model.layers.{index}", window, moe, delta)

    def layer_at(
        self, prefix: str, window: int = 0, moe: MoeConfig | None = None, delta: GatedDeltaConfig | None = None
    ) -> Layer:
        """Reads the layer whose tensors begin with `prefix`; norms without a tensor are None. window: 0 for none.

        moe: its experts; None: it has a dense MLP.  delta: its gated delta rule; None: it has attention.
        """
        attention = f"{prefix}.self_attn" if delta is None else f"{prefix}.linear_attn"
        products = {part: self.linear(*names) for part, names in _products(prefix, moe, delta).items()}
        return Layer(
            attention_norm=self.vector_if_any(f"{prefix}.input_layernorm.weight"),
            qkv=products["qkv"],
            q_norm=self.vector_if_any(f"{attention}.q_norm.weight"),
            k_norm=self.vector_if_any(f"{attention}.k_norm.weight"),
            attention_out=products["attention_out"],
            mlp_norm=self.vector(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=products.get("gate_up"),
            down=products.get("down"),
            window=window,
            moe=None if moe is None else self.experts(f"{prefix}.mlp", moe),
            sinks=self.vector_if_any(f"{attention}.sinks"),
            gated_delta=None if delta is None else gated_delta(self.vector, attention, delta),
        )

    def experts(self, prefix: str, moe: MoeConfig) -> Moe:
        """Reads the router and the experts whose tensors begin with `prefix`."""
        router = self.checkpoint.read(f"{prefix}.gate.weight")
        gate = self.vector(f"{prefix}.shared_expert_gate.weight")[0] if moe.shared_gate else None
        return Moe(
            router=router.to(self.device),
            router_bias=self.vector_if_any(f"{prefix}.gate.bias"),
            shared_gate=gate,
            per_token=moe.experts_per_token,
            renormalise=moe.renormalise,
            intermediate=moe.intermediate_size,
            gate_up=self._expert_linear(_expert_names(prefix, moe.num_experts, _EXPERT_PARTS[0])),
            down=self._expert_linear(_expert_names(prefix, moe.num_experts, _EXPERT_PARTS[1])),
            swiglu_limit=moe.swiglu_limit,
            swiglu_alpha=moe.swiglu_alpha,
        )

    def weight_bytes(self) -> int:
        """Returns the bytes that all matrices of the model take when they are packed."""
        total, sizes, formats = 0, dict[tuple[int | str, ...], int](), self._all_formats()
        for name, shape in expected_tensors(self.checkpoint.config).items():
            if len(shape) == 2:
                form = formats[name.removesuffix(".weight")]
                if (*shape, form) not in sizes:  # experts share theirs
                    sizes[(*shape, form)] = self.ops.empty_weight(*shape, form, torch.device("meta")).data.nbytes
                total += sizes[(*shape, form)]
        return total

    def _all_formats(self) -> dict[str, str]:
        """Returns the format of every matrix of the model."""
        config, formats = self.checkpoint.config, dict[str, str]()
        products = [["model.embed_tokens"], *([] if config.tie_embeddings else [["lm_head"]])]
        for layer in range(config.num_layers):
            prefix, moe = f"model.layers.{layer}", config.layer_moe(layer)
            own = _products(prefix, moe, config.layer_gated_delta(layer))
            products += own.values()
            if moe is None:
                continue
            products += [[f"{prefix}.mlp.gate"], *([[f"{prefix}.mlp.shared_expert_gate"]] if moe.shared_gate else [])]
            for parts in _EXPERT_PARTS:
                names = _expert_names(f"{prefix}.mlp", moe.num_experts, parts)
                for form, part in zip(self._formats.of_experts(names), names, strict=True):
                    formats |= dict.fromkeys(part, form)
        for product in products:
            formats |= zip(product, self._formats.of_product(product), strict=True)
        return formats

    def _check_device(self) -> None:
        config = self.checkpoint.config
        delta = config.gated_delta
        wide = delta is not None and max(delta.key_head_dim, delta.value_head_dim) > MAX_CUDA_DIM
        if self.ops.on_device and wide:
            part = f"recurrent states of heads wider than {MAX_CUDA_DIM}"
            raise ValueError(f"device: {self.checkpoint.source} has {part}, which run on the CPU alone")

    def _check_memory(self) -> None:
        free = free_memory() if is_host(self.device) else None
        if free is not None and (needed := self.weight_bytes()) > free:
            raise ValueError(
                f"model: {self.checkpoint.source} needs {needed / 1e9:.1f} GB for its weights as {self.dtype}, "
                f"{free / 1e9:.1f} GB of memory are free"
            )

    def _expert_linear(self, names: list[list[str]]) -> ExpertProjection:
        """Reads one product of all experts; parts of one format share a weight.  names: of each part's matrices."""
        forms = self._formats.of_experts(names)
        joined = [names] if len(set(forms)) == 1 else [[of_part] for of_part in names]
        runs = [list(zip(*run, strict=True)) for run in joined]  # by expert
        bias = None
        if f"{names[0][0]}.bias" in self.checkpoint.tensors:
            by_expert = zip(*names, strict=True)
            bias = torch.stack([torch.cat([self._bias(name) for name in own]) for own in by_expert])
        return ExpertProjection(
            weights=tuple(self._expert_weight(run, form) for run, form in zip(runs, forms, strict=False)),
            rows=tuple(sum(map(self._rows, run[0])) for run in runs),
            bias=bias,
            float_rows=self.float_rows and any(form not in FLOAT_FORMATS for form in forms),
        )

    def _expert_weight(self, experts: list[tuple[str, ...]], form: str) -> Weight:
        """Packs the matrices of every expert, one expert after the other. experts: names of each one's matrices."""
        columns = self.checkpoint.tensors[f"{experts[0][0]}.weight"].shape[1]
        unit = self.ops.expert_unit
        stride = -(-sum(map(self._rows, experts[0])) // unit) * unit
        matrices = [(expert * stride, names) for expert, names in enumerate(experts)]
        return self._weight_of(matrices, (stride * len(experts), columns), form)

    def vector(self, name: str) -> torch.Tensor:
        """Reads a vector as float32."""
        return self.checkpoint.read(name).float().to(self.device)

    def vector_if_any(self, name: str) -> torch.Tensor | None:
        """Reads a vector as float32; None where the checkpoint has none of this name."""
        return self.vector(name) if name in self.checkpoint.tensors else None

    def linear(self, *names: str) -> Projection:
        """Reads one projection of the rows of all `names`, in order; neighbours of one format share a weight.

        Raises ValueError where only some of them have a bias, and for a bias of another size than its matrix.
        """
        runs: list[tuple[str, list[str]]] = []
        formats = self._formats.of_product(names)
        for name, form in zip(names, formats, strict=True):
            if runs and runs[-1][0] == form:
                runs[-1][1].append(name)
            else:
                runs.append((form, [name]))
        biased = any(f"{name}.bias" in self.checkpoint.tensors for name in names)
        bias = torch.cat([self._bias(name) for name in names]) if biased else None
        coded = any(form not in FLOAT_FORMATS for form in formats)
        order = self._formats.column_order(names[0]) if formats[0] not in FLOAT_FORMATS else None
        columns = None if order is None else order.int().to(self.device)
        weights = tuple(self._weight(run, form, columns) for form, run in runs)
        return Projection(weights, bias, columns, self.float_rows and coded)

    def _bias(self, name: str) -> torch.Tensor:
        bias = self.vector(f"{name}.bias")
        rows = self.checkpoint.tensors[f"{name}.weight"].shape[0]
        if bias.shape != (rows,):
            raise ValueError(
                f"{self.checkpoint.source}: tensor '{name}.bias' has shape {tuple(bias.shape)}, expected {(rows,)}"
            )
        return bias

    def packed(self, rows: torch.Tensor, like: str) -> Projection:
        """Packs computed rows [N, C] as a projection, in the format of tensor `like`."""
        (form,) = self._formats.of_product((like,))
        weight = self.ops.empty_weight(*rows.shape, form, self.device)
        self.ops.pack_linear(rows.to(self.device), weight, 0)
        self.formats.add(form)
        return Projection((weight,), None)

    def _rows(self, name: str) -> int:
        return self.checkpoint.tensors[f"{name}.weight"].shape[0]

    def _weight(self, names: list[str], form: str, order: torch.Tensor | None) -> Weight:
        columns = self.checkpoint.tensors[f"{names[0]}.weight"].shape[1]
        return self._weight_of([(0, names)], (sum(map(self._rows, names)), columns), form, order)

    def _weight_of(
        self, matrices: Sequence[_Run], shape: tuple[int, int], form: str, order: torch.Tensor | None = None
    ) -> Weight:
        """Packs matrices into one weight, or takes it from those kept.  order: see _pack_all."""
        self.formats.add(form)
        names = [name for _, each in matrices for name in each]
        keeps = form not in FLOAT_FORMATS and not all(self._is_stored(name, form) for name in names)
        place = "+".join((names[0], *names[-1:], str(len(names)), form))
        if keeps:
            like = self.ops.empty_weight(*shape, form, torch.device("meta"))
            if (data := self.kept.get(place, like.data)) is not None:
                return Weight(data, shape[0], form)
        weight = self.ops.empty_weight(*shape, form, self.device)
        for first, each in matrices:
            self._pack_all(each, weight, first, order)
        if keeps:
            self.kept.put(place, weight.data)
        return weight

    def _is_stored(self, name: str, form: str) -> bool:
        """Returns whether the file has a matrix in this coded format, so that packing only moves its bytes."""
        return PACKED_BLOCKS.get(self.checkpoint.tensors[f"{name}.weight"].dtype) == form

    def _pack_all(self, names: Sequence[str], weight: Weight, first: int, order: torch.Tensor | None = None) -> None:
        """Packs matrices one after the other, from row `first` on.

        order: of columns, int32 [C], that codes have already and floats get; None: as they are.
        """
        for name in names:
            for start, stop in steps(self._rows(name), self.checkpoint.tensors[f"{name}.weight"].shape[1]):
                self._pack(f"{name}.weight", start, stop, weight, first + start, order)
            first += self._rows(name)

    def _pack(self, name: str, start: int, stop: int, weight: Weight, first: int, order: torch.Tensor | None) -> None:
        kind = self.checkpoint.tensors[name].dtype
        if self._formats.keeps_codes(name.removesuffix(".weight")) and weight.format not in FLOAT_FORMATS:
            coded = self.checkpoint.read_coded(name, start, stop)
            try:
                self.ops.pack_coded(coded, weight, first)
            except ValueError as error:
                raise ValueError(f"{self.checkpoint.source}: tensor '{name}': {error}") from None
        elif self.ops.pack_blocks is not None and PACKED_BLOCKS.get(kind) == weight.format:
            self.ops.pack_blocks(self.checkpoint.read_blocks(name, start, stop), weight, first, kind)
        elif self.ops.requantise_blocks is not None and kind in UNPACKED_BLOCKS and weight.format in ("q8", "q4_min"):
            self.ops.requantise_blocks(self.checkpoint.read_blocks(name, start, stop), weight, first, kind)
        else:
            rows = self.checkpoint.read_rows(name, start, stop, self.device)
            self.ops.pack_linear(rows if order is None else rows[:, order], weight, first)


def check_dtype(dtype: object, ops: Ops) -> None:
    """Raises ValueError for an unknown dtype, and for one that these ops cannot compute with."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype: expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {dtype!r}")
    if dtype in ("int8", "int4") and not {"q8", "q4_min"} <= set(ops.formats):
        raise ValueError(f"dtype: {dtype} weights have no kernels in these ops")
    if dtype == FLOAT_ROWS and ops.on_device:
        raise ValueError(f"dtype: {dtype} is the CPU's; on CUDA codes always multiply rows of floats")


def steps(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yields first and last + 1 row of each block in which a matrix is read."""
    step = max(1, _STEP_BYTES // (4 * columns))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _products(prefix: str, moe: MoeConfig | None, delta: GatedDeltaConfig | None) -> dict[str, list[str]]:
    """Returns the matrices of each product of a layer, those of all experts excluded."""
    attention, mlp = f"{prefix}.self_attn" if delta is None else f"{prefix}.linear_attn", f"{prefix}.mlp"
    inputs, output = (("q_proj", "k_proj", "v_proj"), "o_proj") if delta is None else (IN_PROJECTIONS, "out_proj")
    products = {"qkv": [f"{attention}.{name}" for name in inputs], "attention_out": [f"{attention}.{output}"]}
    dense = mlp if moe is None else f"{mlp}.shared_expert" if moe.shared_size else None
    if dense is not None:
        products |= {"gate_up": [f"{dense}.gate_proj", f"{dense}.up_proj"], "down": [f"{dense}.down_proj"]}
    return products


def _expert_names(prefix: str, count: int, parts: Sequence[str]) -> list[list[str]]:
    """Returns the names of each part's matrices, a matrix for each expert."""
    return [[f"{prefix}.experts.{expert}.{part}" for expert in range(count)] for part in parts]
