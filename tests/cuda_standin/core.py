"""The core's op table over the stand-in: its calls are launches too."""

from __future__ import annotations

import weakref
from types import ModuleType

import torch
from torch.utils import _pytree as pytree

from specengine.ops.commit_tokens import RECORD_HEAD
from tests.cuda_standin.device import Device
from tests.cuda_standin.tensors import DeviceTensor, Wrapper


class Core:
    """Passes the calls of an op table on, with the memory of the stand-in's tensors.

    A dry device runs none of them, but the record of a cycle says that each slot committed one token.
    """

    def __init__(self, core: ModuleType, device: Device) -> None:
        self._core, self._device = core, device

    def set_programmatic_launch(self, enabled: bool) -> None:
        """Does nothing: no time passes on the stand-in."""

    def __getattr__(self, name: str):
        value = getattr(self._core, name)
        if not callable(value) or (isinstance(value, type) and issubclass(value, tuple)):  # a tuple holds the tensors
            return value
        if isinstance(value, type):  # its views have no stream: torch's build for CUDA would ask a driver for one

            def construct(*args, **kwargs):
                inner_args, inner_kwargs = _inner((args, kwargs))
                made = value(*inner_args, **inner_kwargs)
                weakref.finalize(made, lambda *held: None, args, kwargs)  # it keeps alive what it was made of
                return made

            return construct

        def call(*args, **kwargs):
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor)]
            if not tensors:
                return value(*args, **kwargs)
            inner_args, inner_kwargs = _inner((args, kwargs))
            if name.endswith("_workspace"):  # a question about sizes
                return value(*inner_args, **inner_kwargs)
            run = lambda: value(*inner_args, **inner_kwargs)  # noqa: E731
            if records := self._device.dry and name == "commit_tokens":
                run = lambda: _plain_record(inner_args[-1])  # noqa: E731
            blocks = [tensor.block for tensor in tensors]  # the table does not say which it writes
            self._device.launch(run, (), blocks, name=name, always=records)
            return None

        return call


def _inner(arguments):
    return pytree.tree_map_only(Wrapper, lambda tensor: tensor.inner, arguments)


def _plain_record(record: torch.Tensor) -> None:
    """Writes what ops.commit_tokens does where a tree is its root alone and the bonus token is 1."""
    nodes = (record.shape[1] - RECORD_HEAD) // 3
    record[:] = -1
    record[:, :RECORD_HEAD] = torch.tensor([1, 1, 1, 0])
    record[:, RECORD_HEAD] = 0  # the path
    record[:, RECORD_HEAD + nodes] = 1  # the root's token
