"""The tensors of a checkpoint under other names, and those of folders under the names that transformers gives them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch

from specengine.models.checkpoint_base import ENDS, Checkpoint, copy_rows
from specengine.ops.coded.rows import CodedRows

_IN_MODEL = ("embed_tokens.", "layers.", "norm.", "language_model.")
_COMPARED = 4096  # rows of two matrices that are compared at once


class RenamedCheckpoint(Checkpoint):
    """The tensors of some files under other names. names: new name -> name in the files."""

    def __init__(self, files: Checkpoint, names: Mapping[str, str]) -> None:
        self.source = files.source
        self._files = files
        self._names = names
        self.tensors = {name: files.tensors[stored] for name, stored in names.items()}

    def read_blocks(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See Checkpoint."""
        self._info(name)
        return self._files.read_blocks(self._names[name], start, stop)

    def read_coded(self, name: str, start: int, stop: int) -> CodedRows:
        """See Checkpoint."""
        self._info(name)
        return self._files.read_coded(self._names[name], start, stop)

    def column_order(self, name: str) -> torch.Tensor | None:
        """See Checkpoint."""
        return self._files.column_order(self._names[name]) if name in self._names else None

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        copy_rows(out, self._files.read_rows(self._names[name], start, stop))


class _Folder(RenamedCheckpoint):
    """A folder's tensors under other names. tied: whether the head is the embedding."""

    def __init__(self, files: Checkpoint, names: Mapping[str, str], tied: bool) -> None:
        super().__init__(files, names)
        self.config, self.metadata = replace(files.config, tie_embeddings=tied), files.metadata


def with_prefix(files: Checkpoint) -> Checkpoint:
    """Returns a folder's tensors with `model.` before the names of the base model's, once, as transformers loads them.

    Raises ValueError where two tensors would have one name.
    """
    names: dict[str, str] = {}
    for stored in files.tensors:
        bare = re.sub(r"^(model\.)+", "", stored)
        name = f"model.{bare}" if bare.startswith(_IN_MODEL) else bare if bare.startswith("lm_head.") else stored
        if name in names:
            raise ValueError(f"{files.source}: tensors '{names[name]}' and '{stored}' both are '{name}'")
        names[name] = stored
    return files if list(names) == list(files.tensors) else _Folder(files, names, files.config.tie_embeddings)


def with_ends(files: Checkpoint) -> Checkpoint:
    """Returns a folder whose embedding and head are those that transformers has where tie_word_embeddings is true.

    One of them may be missing. A head that differs from the embedding is used, with a warning.
    """
    (embedding, head), names = ENDS, {name: name for name in files.tensors}
    if not files.config.tie_embeddings or head not in names:
        return files
    if embedding not in names:
        names[embedding] = names.pop(head)
        return _Folder(files, names, tied=True)
    if _are_equal(files, embedding, head):
        return files
    warnings.warn(
        f"{files.source}: tie_word_embeddings is true, but '{head}' differs from the embedding; it is used, as "
        "transformers does; without that tensor, the embedding is the head",
        stacklevel=4,
    )
    return _Folder(files, names, tied=False)


def _are_equal(files: Checkpoint, first: str, second: str) -> bool:
    if files.tensors[first].shape != files.tensors[second].shape:
        return False
    rows = (files.tensors[first].shape or (0,))[0]
    return all(
        torch.equal(*(files.read_rows(name, start, min(start + _COMPARED, rows)).float() for name in (first, second)))
        for start in range(0, rows, _COMPARED)
    )
