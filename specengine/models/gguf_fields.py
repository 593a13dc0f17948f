"""The metadata of a GGUF file as typed fields: a number may also be an array with one for each layer."""

from __future__ import annotations

from typing import Any

from specengine.utils.json_fields import Fields

# a layer without such a part has 0 in an array of these
_PARTS = (".attention.head_count", ".attention.head_count_kv", ".feed_forward_length")


class GGUFFields(Fields):
    """A GGUF file's metadata with typed lookups. An array counts as a number where all layers have the same."""

    def _value(self, name: str, kind: type[Any]) -> Any:
        value = self.data.get(name)
        if kind not in (int, float, bool) or not isinstance(value, list):
            return value
        blocks = self.data.get(f"{self.data.get('general.architecture')}.block_count")
        if len(value) != blocks:
            raise self.error(name, f"must be a number or have one for each of {blocks} layers, got {len(value)}")
        entries = [each for each in value if each] if name.endswith(_PARTS) else value
        entries = entries or value
        if other := [each for each in entries if each != entries[0]]:
            raise self.error(name, f"must be the same in all layers, got {entries[0]!r} and {other[0]!r}")
        return entries[0]

    def layers_without(self, name: str) -> frozenset[int] | None:
        """Returns the layers that have 0 in an array, None where the field is no array or has no 0."""
        value = self.data.get(name)
        found = [layer for layer, each in enumerate(value) if not each] if isinstance(value, list) else []
        return frozenset(found) or None
