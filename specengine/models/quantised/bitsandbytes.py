"""4-bit weights of bitsandbytes: nf4 and fp4 codes of the flat weight, high half first, blocks with a scale each.

With double quantisation the scales are codes too: of 256 numbers, in blocks with scales of their own, plus an offset.
"""

from __future__ import annotations

import json
import math

import torch

from specengine.models.quantised.stored import QuantisedWeight, StoredModule
from specengine.ops.weight import FLOAT_FORMATS
from specengine.utils.json_fields import Fields

_MOST_JSON = 1 << 16  # bytes
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


class BitsAndBytes4(QuantisedWeight):
    """weight uint8 [N K / 2, 1], absmax and quant_map beside it, and a tensor of JSON with the shape."""

    ends = frozenset({"weight", "weight.absmax", "weight.quant_map", *_NESTED, *_STATES})

    def __init__(self, stored: StoredModule) -> None:
        self._stored = stored
        state = self._state()
        shape = state.data.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in shape):
            raise state.error("shape", f"must be [rows, columns], got {str(shape)[:80]}")
        self.shape = shape[0], shape[1]
        count = math.prod(self.shape)
        packed = stored.shape("weight", "uint8", *FLOAT_FORMATS, dims=2)
        self._unit = (
            1 if stored.tensors["weight"].dtype == "uint8" else getattr(torch, stored.tensors["weight"].dtype).itemsize
        )
        if packed != (-(-count // (2 * self._unit)), 1):
            raise stored.error("weight", f"has shape {packed}, which does not hold {self.shape} codes of 4 bits")
        self._block = _block(state, "blocksize")
        self._blocks = -(-count // self._block)
        self._map = self._table("weight.quant_map", 16)
        self._nested = "weight.nested_absmax" in stored.tensors
        if self._nested:
            stored.expect("weight.absmax", (self._blocks,), "uint8")
            self._nested_map = self._table("weight.nested_quant_map", 256)
            self._nested_block = _block(state, "nested_blocksize")
            stored.expect("weight.nested_absmax", (-(-self._blocks // self._nested_block),), *FLOAT_FORMATS)
            self._offset = state.get("nested_offset", float)
            if not math.isfinite(self._offset):
                raise state.error("nested_offset", f"must be finite, got {self._offset}")
        else:
            stored.expect("weight.absmax", (self._blocks,), *FLOAT_FORMATS)

    def _state(self) -> Fields:
        end = next((each for each in _STATES if each in self._stored.tensors), _STATES[0])
        (size,) = self._stored.shape(end, "uint8", dims=1)
        if size > _MOST_JSON:
            raise self._stored.error(end, f"has {size} bytes, expected at most {_MOST_JSON}")
        try:
            data = json.loads(bytes(self._stored.whole(end).tolist()).decode())
        except (ValueError, RecursionError) as error:
            raise self._stored.error(end, f"is no JSON: {error}") from None
        return Fields(data, f"{self._stored.files.source}: tensor '{self._stored.name}.{end}'")

    def _table(self, end: str, size: int) -> torch.Tensor:
        self._stored.expect(end, (size,), *FLOAT_FORMATS)
        return self._stored.finite(end, self._stored.whole(end).float())

    def values(self, start: int, stop: int) -> torch.Tensor:
        """See QuantisedWeight."""
        columns = self.shape[1]
        first, last = start * columns, stop * columns
        unit = 2 * self._unit
        packed = self._stored.rows("weight", first // unit, -(-last // unit)).view(torch.uint8).view(-1)
        codes = torch.stack((packed >> 4, packed & 15), dim=1).view(-1)
        codes = codes[first % unit : first % unit + last - first]
        begin = first // self._block
        scales = self._scales(begin, -(-last // self._block))
        blocks = torch.arange(first, last) // self._block - begin
        return (self._map[codes.int()] * scales[blocks]).view(-1, columns)

    def _scales(self, start: int, stop: int) -> torch.Tensor:
        held = self._stored.rows("weight.absmax", start, stop)
        if not self._nested:
            return self._stored.finite("weight.absmax", held.float())
        begin = start // self._nested_block
        outer = self._stored.rows("weight.nested_absmax", begin, -(-stop // self._nested_block)).float()
        outer = self._stored.finite("weight.nested_absmax", outer)
        blocks = torch.arange(start, stop) // self._nested_block - begin
        return self._nested_map[held.int()] * outer[blocks] + self._offset


def _block(state: Fields, name: str) -> int:
    size = state.get(name, int)
    if not 1 <= size <= 1 << 16:
        raise state.error(name, f"must be 1 to 65536, got {size}")
    return size
