"""Everything that can be said against the arguments of `InstrumentedStep` before anything is touched."""
from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from instrument import _compat
from instrument.kinds import is_number, is_whole
from instrument.shards import check_options
from instrument.taps import ALL_STATS


def check_arguments(network: Any, optimizer: Any, *, loss_scale: Any, max_grad_norm: Any, accumulate: Any, loss_key: Any,
                    activation_stats: Any, every: Any = 1,
                    window: Any = None, spike_window: Any = None, skip_spikes: Any = None, scope: Any = "global",
                    allow_unverified: Any = False, **by_shape: Any) -> None:
    """Raise TypeError or ValueError for the first argument that cannot work.

    Args:
        by_shape: Options that go by the shapes of whole tensors; what they must be otherwise is checked elsewhere.
    """
    if not isinstance(network, nn.Cell):
        raise TypeError(f"`network` must be a Cell that returns the loss, but it is a {type(network).__name__}. "
                        "A network and a loss function make one by nn.WithLossCell(network, loss_fn).")
    if isinstance(network, nn.TrainOneStepCell):
        raise ValueError(f"`network` is a {type(network).__name__}, a training step already. Pass the network inside it "
                         "(its attribute `network`): InstrumentedStep takes the place of the step.")
    weights = list(getattr(optimizer, "parameters", ()))
    if not isinstance(optimizer, nn.Cell) or not weights:
        raise ValueError(f"`optimizer` must be an optimizer Cell with parameters, but {type(optimizer).__name__} has none. "
                         "Make it with network.trainable_params(), which must not be empty.")
    for name, cell in network.cells_and_names():
        if isinstance(cell, (nn.EmbeddingLookup, nn.MultiFieldEmbeddingLookup)) and cell.sparse:
            raise ValueError(f"cell {name!r} ({type(cell).__name__}) has sparse=True: MindSpore's compiler gives no type to "
                             "what is computed of a sparse gradient, so its norm cannot be measured. Make it with "
                             "sparse=False, or use nn.Embedding.")
    known = {id(parameter) for parameter in network.get_parameters()}
    strangers = [parameter.name for parameter in weights if id(parameter) not in known]
    if strangers:
        raise ValueError(f"`optimizer` updates parameters that are not in `network`: {', '.join(strangers[:5])}. Make it "
                         "with the trainable_params() of this very network, not of a copy.")
    for inner in (optimizer, getattr(optimizer, "opt", None)):
        own_scale = getattr(inner, "loss_scale", 1.0)
        if is_number(own_scale) and own_scale != 1:
            raise ValueError(f"`optimizer` divides gradients by a loss_scale of its own, {own_scale}, and the step unscales "
                             "them already. Make it without loss_scale and give InstrumentedStep the argument loss_scale.")
    if max_grad_norm is not None and not (is_number(max_grad_norm) and 0 < max_grad_norm < float("inf")):
        raise ValueError(f"`max_grad_norm` must be a positive number or None (no clipping), but it is {max_grad_norm!r}.")
    if not (is_whole(accumulate) and accumulate >= 1):
        raise ValueError(f"`accumulate` must be a whole number of calls from 1, but it is {accumulate!r}.")
    if not (is_whole(every) and every >= 1):
        raise ValueError(f"`every` must be a whole number of steps from 1, but it is {every!r}.")
    if window is not None and not (is_whole(window) and window >= 1):
        raise ValueError(f"`window` must be a whole number of steps from 1, or None, but it is {window!r}.")
    if spike_window is not None and not (is_whole(spike_window) and spike_window >= 2):
        raise ValueError(f"`spike_window` must be a whole number of steps from 2, or None, but it is {spike_window!r}.")
    if skip_spikes is not None:
        if not (is_number(skip_spikes) and skip_spikes > 0):
            raise ValueError(f"`skip_spikes` must be a positive number of standard deviations, or None, but it is "
                             f"{skip_spikes!r}.")
        if spike_window is None:
            raise ValueError("`skip_spikes` compares with the last good steps: say how many by `spike_window`.")
        if every != 1:
            raise ValueError(f"`skip_spikes` looks at each step, and every={every} measures some only. Use every=1 with it.")
    if loss_key is not None and (not isinstance(loss_key, (str, int)) or isinstance(loss_key, bool)):
        raise TypeError(f"`loss_key` must be a key (str), an index (int) or None, but it is {loss_key!r}.")
    if scope not in ("global", "local"):
        raise ValueError(f"`scope` must be 'global' (of all ranks) or 'local' (of this rank), but it is {scope!r}.")
    check_loss_scale(loss_scale)
    if not isinstance(activation_stats, (list, tuple)) or any(stat not in ALL_STATS for stat in activation_stats):
        raise ValueError(f"`activation_stats` must be a sequence out of {', '.join(ALL_STATS)}, but it is "
                         f"{activation_stats!r}.")
    check_flags(allow_unverified=allow_unverified)
    setting = _compat.sharded_here(allow_unverified)
    if setting and not allow_unverified:
        _compat.refuse_shards(setting)
    if setting:
        check_options(network, setting, loss_scale=loss_scale, max_grad_norm=max_grad_norm, skip_spikes=skip_spikes,
                      accumulate=accumulate, **by_shape)


def check_flags(**flags: Any) -> None:
    """TypeError for the first argument that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"`{name}` must be True or False, but it is {value!r}.")


def check_loss_scale(loss_scale: Any) -> None:
    """Raise unless `loss_scale` is one of the things that it can be."""
    if isinstance(loss_scale, nn.Cell):
        if not hasattr(loss_scale, "get_loss_scale"):
            raise TypeError(f"`loss_scale` is a {type(loss_scale).__name__}, which has no get_loss_scale(). Use "
                            "nn.DynamicLossScaleUpdateCell, nn.FixedLossScaleUpdateCell, a number or a Tensor.")
    elif isinstance(loss_scale, Tensor):
        if loss_scale.shape not in ((), (1,)) or loss_scale.dtype != ms.float32:
            raise ValueError("`loss_scale` as a Tensor must be float32 of shape () or (1,), but it is "
                             f"{loss_scale.dtype} of shape {loss_scale.shape}.")
    elif loss_scale is not None and not (is_number(loss_scale) and 0 < loss_scale < float("inf")):
        raise ValueError("`loss_scale` must be a positive number, a Tensor, an update cell or None, but it is "
                         f"{loss_scale!r}.")
    if loss_scale is not None:
        _compat.check_overflow_is_visible()
