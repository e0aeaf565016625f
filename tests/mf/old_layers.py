"""What layers of older MindFormers lack to run on a CPU or on this MindSpore; nothing that a training step has to do with."""
from __future__ import annotations

from importlib import import_module

from mindspore import ops


def patch() -> None:
    """Patch the layers, where they need it."""
    for name in ("mindformers.modules.layers", "mindformers.models.llama.llama_layer"):
        try:
            module = import_module(name)
        except ImportError:
            continue
        for kind in ("RotaryEmbedding", "LlamaRotaryEmbedding"):
            cls = vars(module).get(kind)
            if cls is not None and cls.__module__ == name:
                _give_cast(cls)
            if kind == "LlamaRotaryEmbedding" and cls is not None:
                cls.rotate_half = _rotate_half


def _rotate_half(self, x, swap_mask):
    """0.8 multiplies batches by one matrix, for which a CPU has no kernel."""
    batch, heads, length, width = x.shape
    return ops.reshape(ops.MatMul()(ops.reshape(x, (batch * heads * length, width)), swap_mask), (batch, heads, length, width))


def _give_cast(cls):
    """Up to 1.3.2 it uses `self.cast` as a primitive; Cells of MindSpore 2.7 have no such one any more."""
    own = cls.__init__

    def __init__(self, *args, **kwargs):
        own(self, *args, **kwargs)
        if "cast" not in vars(self) and "cast" not in self._cells:
            self.cast = ops.Cast()

    cls.__init__ = __init__
