"""The core's op table over the stand-in: its calls are launches too."""

from __future__ import annotations

from types import ModuleType

from torch.utils import _pytree as pytree

from tests.cuda_standin.device import Device
from tests.cuda_standin.tensors import DeviceTensor, Wrapper


class Core:
    """Passes the calls of an op table on, with the memory of the stand-in's tensors."""

    def __init__(self, core: ModuleType, device: Device) -> None:
        self._core, self._device = core, device

    def set_programmatic_launch(self, enabled: bool) -> None:
        """Does nothing: no time passes on the stand-in."""

    def __getattr__(self, name: str):
        value = getattr(self._core, name)
        if isinstance(value, type) or not callable(value):
            return value

        def call(*args, **kwargs):
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor)]
            if not tensors:
                return value(*args, **kwargs)
            inner_args, inner_kwargs = pytree.tree_map_only(Wrapper, lambda t: t.inner, (args, kwargs))
            if name.endswith("_workspace"):  # a question about sizes
                return value(*inner_args, **inner_kwargs)
            blocks = [tensor.block for tensor in tensors]  # the table does not say which it writes
            self._device.launch(lambda: value(*inner_args, **inner_kwargs), (), blocks, name=name)
            return None

        return call
