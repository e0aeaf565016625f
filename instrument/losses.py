"""From whatever a network returns to one scalar loss to differentiate and the other losses to report.

Owns the choice of the loss among several outputs and the names of the others. Computes no statistics.
"""
from __future__ import annotations

import difflib
import itertools
import weakref
from typing import Any, Union

import mindspore as ms
from mindspore import Tensor, nn, ops

from instrument import _compat, stats

LossKey = Union[str, int, None]

# Buffers that outlive a step are made before the first compile tells how many parts there are.
MAX_PARTS = 15

_identities = itertools.count()
_by_identity: weakref.WeakValueDictionary[int, LossOutputs] = weakref.WeakValueDictionary()


class LossOutputs(nn.Cell):
    """Calls the network; returns the loss to differentiate, the loss as it is, and all losses as one vector.

    Args:
        network: Returns a scalar, or a tuple, list or dict with the loss among its values.
        loss_key: Which value of a tuple (its index) or dict (its key) is the loss; None is the first.
        scaled: Whether the loss to differentiate is multiplied by the loss scale.
        learned: A weak reference to what to call when the parts become known, or others.

    Attributes:
        parts: Names of the other losses; known once the network has been compiled or called.
    """

    def __init__(self, network: nn.Cell, loss_key: LossKey, scaled: bool, learned: weakref.WeakMethod):
        super().__init__(auto_prefix=False)
        self.network = network
        self.loss_key = loss_key
        self.scaled = scaled
        self.parts: tuple[str, ...] = ()
        self.is_known = False
        self.learned = learned
        self.identity = next(_identities)
        _by_identity[self.identity] = self

    def learn(self, parts: tuple[str, ...]) -> None:
        """Take the names of the other losses."""
        if self.is_known and parts != self.parts and _compat.is_graph_mode():
            raise ValueError(f"the network returns other losses ({', '.join(parts) or 'none'}) than it did before "
                             f"({', '.join(self.parts) or 'none'}): one vector cannot name both. Return the same always.")
        self.is_known = True
        if parts != self.parts:
            self.parts = parts
            notify = self.learned()
            if notify is not None:
                notify()

    def construct(self, scale, *inputs):
        output = self.network(*inputs)
        keys = None
        values = (output,)
        if isinstance(output, dict):
            keys = tuple(output.keys())
            values = tuple(output.values())
        elif isinstance(output, (tuple, list)):
            keys = len(output)
            values = output
        chosen = position_of_loss(self.loss_key, keys)
        loss = values[chosen]
        check_loss(dtypes_of((loss,)), shapes_of((loss,)))
        positions = positions_of_parts(self.identity, keys, chosen, dtypes_of(values), shapes_of(values))
        losses = (as_element(loss),)
        for position in positions:
            losses = losses + (as_element(values[position]),)
        losses = ops.Concat()(losses)
        if self.scaled:
            return loss * ops.cast(scale, loss.dtype), loss, losses
        return loss, loss, losses


def as_element(value):
    """A tensor of one element as float32 [1]."""
    return ops.cast(ops.reshape(value, (1,)), ms.float32)


def dtypes_of(values):
    """The types of the tensors among `values`, None for anything else."""
    dtypes = ()
    for value in values:
        if isinstance(value, Tensor):
            dtypes = dtypes + (value.dtype,)
        else:
            dtypes = dtypes + (None,)
    return dtypes


def shapes_of(values):
    """The shapes of the tensors among `values`, None for anything else."""
    shapes = ()
    for value in values:
        if isinstance(value, Tensor):
            shapes = shapes + (value.shape,)
        else:
            shapes = shapes + (None,)
    return shapes


@_compat.constexpr
def position_of_loss(loss_key: LossKey, keys: Any) -> int:
    """Position of the loss among the outputs; `keys` is None for one output, a number for a tuple, names for a dict."""
    if keys is None:
        if loss_key not in (None, 0):
            raise ValueError(f"loss_key={loss_key!r} does not exist: the network returns one value. Leave loss_key out.")
        return 0
    names = list(range(keys)) if isinstance(keys, int) else list(keys)
    if not names:
        raise ValueError("the loss must be among the outputs of the network, but it returns none.")
    if len({str(name) for name in names}) < len(names):
        raise ValueError(f"the network returns losses under keys that have one name: {names}. Rename them.")
    if loss_key is None:
        return 0
    if loss_key not in names:
        near = difflib.get_close_matches(str(loss_key), [str(name) for name in names], n=3, cutoff=0.1)
        raise ValueError(f"loss_key={loss_key!r} does not exist: the network returns {names}."
                         + (f" Near: {', '.join(near)}." if near else ""))
    return names.index(loss_key)


@_compat.constexpr
def check_loss(dtypes: Any, shapes: Any) -> None:
    """ValueError unless the loss is a float tensor of one element."""
    if dtypes[0] not in _compat.FLOAT_TYPES or stats.size_of(shapes[0]) != 1:
        raise ValueError(f"the loss must be a scalar of a float type, but its shape is {shapes[0]} and its type {dtypes[0]}. "
                         "Reduce it in the network, for example with ops.ReduceMean(), or name another output by loss_key.")


@_compat.constexpr
def positions_of_parts(identity: int, keys: Any, chosen: int, dtypes: Any, shapes: Any) -> tuple[int, ...]:
    """Positions of the other scalars of float type; tells the `LossOutputs` of this identity their names."""
    names = [0] if keys is None else list(range(keys)) if isinstance(keys, int) else list(keys)
    positions = [i for i in range(len(names))
                 if i != chosen and dtypes[i] in _compat.FLOAT_TYPES and stats.size_of(shapes[i]) == 1]
    if len(positions) > MAX_PARTS:
        raise ValueError(f"the network returns {len(positions)} losses beside the one to differentiate, but at most "
                         f"{MAX_PARTS} can be reported. Return fewer.")
    _by_identity[identity].learn(tuple(str(names[i]) for i in positions))
    return tuple(positions)
