"""One quantised weight: the tensors that a file has for its module, and what the readers of all formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from specengine.models.checkpoint_base import TensorInfo
from specengine.models.quantised.files import QuantisedFiles
from specengine.ops.coded.rows import CodedRows, Coding
from specengine.ops.weight import FLOAT_FORMATS

EXPONENTS = ("uint8", "float8_e8m0fnu")  # types of scales that are powers of two
_POWERS = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")])


@dataclass(frozen=True)
class StoredModule:
    """The tensors of one module. tensors: by the end of their names, such as "qweight" or "weight.absmax"."""

    files: QuantisedFiles
    name: str
    tensors: Mapping[str, TensorInfo]

    def shape(self, end: str, *dtypes: str, dims: int | None = None) -> tuple[int, ...]:
        """Returns a tensor's shape.

        Raises ValueError where it is missing, has a type outside `dtypes` or not `dims` dimensions, or is empty.
        """
        info = self.tensors.get(end)
        if info is None:
            present = ", ".join(sorted(self.tensors))
            raise self.error(end, f"is missing; its module has {present[:200]}")
        if info.dtype not in dtypes:
            raise self.error(end, f"has type {info.dtype}, expected {' or '.join(dtypes)}")
        if 0 in info.shape or (dims is not None and len(info.shape) != dims):
            wanted = f"{dims} dimensions, none" if dims is not None else "no dimension"
            raise self.error(end, f"has shape {info.shape}, expected {wanted} of size 0")
        return info.shape

    def expect(self, end: str, expected: tuple[int, ...], *dtypes: str) -> None:
        """Raises ValueError where a tensor is missing or has another shape or type."""
        shape = self.shape(end, *dtypes)
        if shape != expected:
            raise self.error(end, f"has shape {shape}, expected {expected}")

    def rows(self, end: str, start: int, stop: int) -> torch.Tensor:
        """Reads rows [start, stop) of a tensor."""
        return self.files.read_rows(self._full(end), start, stop)

    def columns(self, end: str, start: int, stop: int) -> torch.Tensor:
        """Reads columns [start, stop) of a matrix."""
        return self.files.read_columns(self._full(end), start, stop)

    def whole(self, end: str) -> torch.Tensor:
        """Reads a tensor, which may be a scalar."""
        return self.files.read_whole(self._full(end))

    def number(self, end: str) -> torch.Tensor:
        """Reads a finite float of one element as float32 [1]."""
        if self.shape(end, *FLOAT_FORMATS) not in ((), (1,), (1, 1)):
            raise self.error(end, f"has shape {self.tensors[end].shape}, expected one number")
        return self.finite(end, self.whole(end).float().view(1))

    def finite(self, end: str, values: torch.Tensor) -> torch.Tensor:
        """Returns `values`, read from a tensor. Raises ValueError where one of them is not finite."""
        if not torch.isfinite(values).all():
            raise self.error(end, "has values that are not finite, expected finite ones")
        return values

    def error(self, end: str, problem: str) -> ValueError:
        """Makes a ValueError that names a tensor of this module."""
        return ValueError(f"{self.files.source}: tensor '{self._full(end)}' {problem}")

    def _full(self, end: str) -> str:
        return f"{self.name}.{end}" if self.name else end


class QuantisedWeight(ABC):
    """A weight float32 [N, K]. ends: of the tensors that belong to it.  shape: (N, K).  order: see column_order."""

    ends: frozenset[str]
    shape: tuple[int, int]
    order: torch.Tensor | None = None

    @property
    def kernel_coding(self) -> Coding | None:
        """The coding of `coded`, for kernels; None for a weight that has `values` only."""
        return None

    @abstractmethod
    def values(self, start: int, stop: int) -> torch.Tensor:
        """Reads rows [start, stop) as float32, columns in the order of the model."""

    def coded(self, start: int, stop: int) -> CodedRows:
        """Reads rows [start, stop) as codes, columns in the order of `order`."""
        raise NotImplementedError


class CodedWeight(QuantisedWeight):
    """A weight whose values follow from its coded rows.

    odd_groups: the group of each column, int64 [K], where groups are neither in order nor of one size.
    """

    coding: Coding
    odd_groups: torch.Tensor | None = None

    @property
    def kernel_coding(self) -> Coding | None:
        """See QuantisedWeight. Kernels take groups of whole rows or of a multiple of 16 columns."""
        regular = self.coding.group == self.shape[1] or self.coding.group % 16 == 0
        return self.coding if regular and self.odd_groups is None else None

    def values(self, start: int, stop: int) -> torch.Tensor:
        """See QuantisedWeight."""
        coded = self.coded(start, stop)
        if self.odd_groups is not None and coded.zeros is not None:  # columns take the numbers of their own groups
            return (coded.codes.float() - coded.zeros[:, self.odd_groups]) * coded.scales[:, self.odd_groups]
        rows = coded.values()
        if self.order is None:
            return rows
        placed = torch.empty_like(rows)
        placed[:, self.order] = rows
        return placed

    def follow(self, stored: StoredModule, end: str, groups: int) -> None:
        """Reads the group of each column, integers [K], and sets `order` or `odd_groups` where they are not in order.

        Raises ValueError for a group outside [0, groups).
        """
        columns, group = self.shape[1], self.coding.group
        found = stored.whole(end).long()
        # in order: compressed-tensors writes -1, and loaders of GPTQ files take an index of zeros for no act-order
        if groups == 1 or (found == -1).all() or not found.any():
            return
        if found.min() < 0 or found.max() >= groups:
            raise stored.error(end, f"has groups {found.min()} to {found.max()}, expected 0 to {groups - 1}")
        if torch.equal(found, torch.arange(columns) // group):
            return
        if (found.bincount(minlength=groups) == group).all():
            self.coding = replace(self.coding, ordered=True)
            self.order = found.argsort(stable=True)
        else:
            self.odd_groups = found


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """Returns 2^(byte - 127) of e8m0 scales; byte 255 is not a number."""
    return _POWERS[exponents.view(torch.uint8).int()]


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Splits rows of a little-endian stream of fields, integers [R, W], into uint8 [R, count]."""
    # a transposed matrix of one column counts as contiguous whatever its strides are
    stream = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:  # each byte becomes an int16, whose bytes are its two fields
        wide = stream.short()
        return (wide | wide << 4).bitwise_and_(0x0F0F).view(torch.uint8)[:, :count]
    if bits == 2:
        wide = stream.int()
        wide = wide | wide << 6 | wide << 12 | wide << 18
        return wide.bitwise_and_(0x03030303).view(torch.uint8)[:, :count]
    if bits == 8:
        return stream[:, :count]
    first = torch.arange(count) * bits
    byte = first // 8
    pairs = torch.nn.functional.pad(stream, (0, 1)).int()
    pairs = pairs[:, byte] | pairs[:, byte + 1] << 8
    return (pairs >> (first % 8) & (2**bits - 1)).to(torch.uint8)


def group_size(stored: StoredModule, end: str, groups: int, columns: int, said: int | None) -> int:
    """Returns how many columns share a scale. said: by the configuration; None or -1 for a silent one or whole rows.

    Raises ValueError where `groups` scales fit neither.
    """
    if said is None and columns % groups == 0:
        return columns // groups
    wanted = 1 if said is None or said < 1 else -(-columns // said)
    if groups == wanted:
        return columns if said is None or said < 1 else min(said, columns)
    raise stored.error(end, f"has {groups} scales for {columns} columns, expected {wanted} (group size {said})")
