"""Packs a trained drafter: rounds its matrices where the loss feels it least, and stores differences from others.

The loss of a matrix moved by E rises by about sum_r rows[r] * E[r] columns E[r]^T / (2 * trace(columns)). Both factors
come from the gradients G of single dialogues, as in Shampoo (Gupta et al. 2018): rows sums the diagonals of G G^T,
columns the products G^T G. A row's step makes each of its codes cost the same rise as any other code of the drafter.
The error of a code changes the later weights of its row before they are rounded, as in GPTQ (Frantar et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specengine.models.draft_files import BLOCK, Bases
from specengine.models.quantised.packed_weights import OWN, PackedMatrix, like, write_packed
from specengine.train.objectives.base import Objective
from specengine.train.objectives.training_batch import TrainingBatch

_LEAST_ROW = 0.002  # of the mean: rows without a gradient in these dialogues matter in others
_DAMPING = 0.01  # likewise of columns
_CODES = 64  # columns whose errors change all later columns by one product
_MOST_CODE = 127


@dataclass
class Curvature:
    """What the loss of some dialogues has to say about a matrix. rows: [R].  columns: [C, C]; see the module."""

    rows: torch.Tensor
    columns: torch.Tensor

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a dialogue's gradient [R, C]."""
        self.rows += gradient.square().sum(1)
        self.columns += gradient.T @ gradient


def measure(
    objective: Objective, tensors: dict[str, torch.Tensor], batches: Iterable[TrainingBatch]
) -> dict[str, Curvature]:
    """Measures the curvature of the matrices in `tensors` that the network has, for the loss of a token.

    tensors: as exported, floats.  batches: of one dialogue each.
    """
    network = objective.network
    network.load_state_dict(objective.adopted(dict(tensors)))
    scale = objective.adopted({name: torch.ones_like(x) for name, x in tensors.items()})  # network's = scale * exported
    matrices = {
        name: parameter
        for name, parameter in network.named_parameters()
        if name in tensors and parameter.ndim == 2 and parameter.shape[1] % BLOCK == 0
    }
    found = {n: Curvature(p.new_zeros(len(p)), p.new_zeros(p.shape[1], p.shape[1])) for n, p in matrices.items()}
    tokens = 0
    for batch in batches:
        network.zero_grad()
        objective.loss(batch)[0].backward()
        tokens += int(batch.wanted.sum())
        for name, parameter in matrices.items():
            if parameter.grad is not None:
                found[name].add(parameter.grad * scale[name].to(parameter.device))
    network.zero_grad()
    return {n: Curvature((x.rows / tokens).cpu(), (x.columns / tokens).cpu()) for n, x in found.items() if x.rows.any()}


def rounded(change: torch.Tensor, curvature: Curvature, rise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a matrix [R, C] to codes int8 [R, C] and steps float16 [R]; `rise` is the rise of the loss per code."""
    rows = curvature.rows.clamp(min=_LEAST_ROW * float(curvature.rows.mean()))
    columns = curvature.columns.double()
    trace = float(columns.trace())
    columns += _DAMPING * columns.diagonal().mean() * torch.eye(len(columns), dtype=columns.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(columns))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    alone = float(factor.diagonal().double().pow(-2).mean())  # the cost of an error that later codes balance
    steps = (24 * rise * trace / (rows * alone)).sqrt()
    steps = torch.maximum(steps, change.abs().amax(1) / _MOST_CODE).clamp(6e-8, 6e4).to(torch.float16)
    rest = change / steps.float()[:, None]
    codes = torch.empty(change.shape, dtype=torch.int8)
    for start in range(0, change.shape[1], _CODES):
        end = min(start + _CODES, change.shape[1])
        errors = torch.empty(len(change), end - start)
        for i in range(start, end):
            code = rest[:, i].round().clamp(-_MOST_CODE, _MOST_CODE)
            codes[:, i] = code.to(torch.int8)
            error = (rest[:, i] - code) / factor[i, i]
            errors[:, i - start] = error
            rest[:, i + 1 : end] -= error[:, None] * factor[i, i + 1 : end]
        rest[:, end:] -= errors @ factor[start:end, end:]
    return codes, steps


def pack(
    path: Path,
    tensors: dict[str, torch.Tensor],
    curvatures: dict[str, Curvature],
    rise: float,
    sources: Sequence[str],
) -> None:
    """Writes packed weights. Matrices without a curvature are stored in 8 bits a code.

    tensors: of the drafter, floats as float32.  rise: of the loss per token, by all roundings together.
    sources: of the matrices that differences are taken from, see Bases.
    """
    bases = Bases(path.parent)
    vocabulary = tensors.get("d2t")
    tokens = None if vocabulary is None else vocabulary + torch.arange(len(vocabulary))
    share = rise / max(1, sum(tensors[name].numel() for name in curvatures))
    out: dict[str, torch.Tensor | PackedMatrix] = {}
    done: dict[str, torch.Tensor] = {}
    for name in sorted(tensors, key=lambda name: (name != "d2t", name)):  # unpacking aligns rows by d2t
        tensor = tensors[name]
        if name in curvatures:
            base, place = _nearest(tensor, _candidates(tensor, bases, sources, done, tokens))
            codes, steps = rounded(tensor if base is None else tensor - base, curvatures[name], share)
            out[name] = packed = PackedMatrix(codes, steps, place)
            done[name] = packed.values(base)
        elif tensor.is_floating_point() and tensor.ndim == 2:
            steps = (tensor.abs().amax(1) / _MOST_CODE).clamp(6e-8, 6e4).to(torch.float16)
            codes = (tensor / steps.float()[:, None]).round().clamp(-_MOST_CODE, _MOST_CODE)
            out[name] = PackedMatrix(codes.to(torch.int8), steps)
        else:
            out[name] = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    write_packed(path, out, {source: bases.digest(source) for source in sources})


def _candidates(
    tensor: torch.Tensor,
    bases: Bases,
    sources: Sequence[str],
    done: dict[str, torch.Tensor],
    tokens: torch.Tensor | None,
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Lists sources, names and values of the matrices that could be a base of this one."""
    rows, columns = tensor.shape
    for name, matrix in done.items():
        if len(matrix) == rows and matrix.shape[1] >= columns:
            yield OWN, name, like(matrix, tensor.shape)
    for source in sources:
        checkpoint = bases.open(source)
        for name, info in checkpoint.tensors.items():
            if len(info.shape) != 2 or info.shape[1] < columns or not name.endswith(".weight"):
                continue
            aligned = tokens is not None and "d2t" in checkpoint.tensors and len(tokens) == rows
            if info.shape[0] == rows or (aligned and info.shape[0] == checkpoint.tensors["d2t"].shape[0]):
                yield source, name, bases.read(source, name, tensor.shape, tokens)


def _nearest(
    tensor: torch.Tensor, candidates: Iterable[tuple[str, str, torch.Tensor]]
) -> tuple[torch.Tensor | None, tuple[str, str] | None]:
    """Finds the candidate with the least squared distance, None where zero is nearer."""
    least, best, place = float(tensor.square().sum()), None, None
    for source, name, matrix in candidates:
        if (distance := float((tensor - matrix).square().sum())) < least:
            least, best, place = distance, matrix, (source, name)
    return best, place
