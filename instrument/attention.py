"""Attention: the largest score and the mean entropy of each layer, by probes that a network holds and of MindSpore's own
`nn.MultiheadAttention`.

Owns the probe, the mathematics of both numbers, and reaching the scores of a cell that shows none. How the numbers leave
the graph is in `taps.py`.

`nn.MultiheadAttention` computes its scores inside a function, and the weights that it can return are those after Dropout,
which have another entropy. So its tap computes the scores again, in float32, from the cell's own query, key, weights and
masks, by the formula of MindSpore's `multi_head_attention_forward`; it does so in the backward, and only in a step that is
measured. 2.0.0 to 2.10.0 have one formula. `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer` call such cells.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from instrument import _compat, stats
from instrument._compat import constexpr
from instrument.select import measurable
from instrument.taps import Gate, GatedCarrier, GatedTap, PlainCarrier, Recipe, Tap, own_class

KINDS = ("scores", "probabilities")

# What a tap carries of attention, in the order in which it does. All of them merge by addition.
COLUMNS = ("calls", "rows", "entropy", "max_logit")

_RECIPES = {
    "count": Recipe("calls", "sum", "calls"),
    "max_logit": Recipe("1", "mean_of_max", "max_logit", "calls"),
    "entropy": Recipe("nats", "mean", "entropy", "rows"),
}

_add = ops.Add()
_cast = ops.Cast()
_concat = ops.Concat()
_concat_keys = ops.Concat(2)
_concat_last = ops.Concat(3)
_div = ops.RealDiv()
_equal = ops.Equal()
_exp = ops.Exp()
_is_nan = ops.IsNan()
_log = ops.Log()
_logical_or = ops.LogicalOr()
_matmul = ops.MatMul(transpose_b=True)
_matmul_heads = ops.BatchMatMul(transpose_b=True)
_max = ops.ReduceMax()
_maximum = ops.Maximum()
_mul = ops.Mul()
_neg = ops.Neg()
_not_equal = ops.NotEqual()
_reshape = ops.Reshape()
_select = ops.Select()
_shape = ops.Shape()
_slice = ops.Slice()
_stop = ops.stop_gradient
_sub = ops.Sub()
_sum = ops.ReduceSum()
_tile = ops.Tile()
_transpose = ops.Transpose()

_NAN = Tensor([math.nan], ms.float32)
_UNSEEN = Tensor(-1000.0, ms.float32)  # exp of it is 0, and 0 times it as well, which of -inf is NaN
_ZERO = Tensor(0.0, ms.float32)


class AttentionProbe(nn.Cell):
    """Measures the attention scores, or probabilities, that it is called on. An identity: it gives them back.

    A network holds it as a member, one a layer, so that the numbers have the layer's name. `InstrumentedStep` finds it
    and adds to the vector, with the probe's name in `cells_and_names()`:

    - `attention/count/<cell>` (calls);
    - `attention/max_logit/<cell>` (1, the unit of the scores), of scores only: the largest score in one call; of several
      calls (accumulation too) the mean of the calls' maxima. NaN and +inf are shown. Entries masked by -inf or a large
      negative number do not matter;
    - `attention/entropy/<cell>` (nats): -Σ p ln p of a row, its mean over the rows of all calls, between 0 (all weight on
      one key) and ln n for n keys. p is the softmax of the scores over the last axis, or the probabilities. 0 · ln 0 is 0.
      NaN where a row has NaN or +inf, and where it is -inf throughout: softmax is NaN there as well. A row
      wholly masked by a finite number counts as what softmax makes of it, the uniform one: ln n.

    Scores are cast to float32 first, and everything is computed and summed in float32, in the backward of the step.
    Elsewhere (evaluation, `ms.export`, a plain training step) nothing is computed. The formula is Shannon's (A
    Mathematical Theory of Communication, 1948), in the form ln Σ e^z - Σ z e^z / Σ e^z with z = score - largest of the row;
    the largest score is what "Scaling Vision Transformers to 22 Billion Parameters" (2023, section 2.1) watches.

    A function of the scores alone cannot do this: it has neither a name nor a place for what it measures in the compiled
    graph. Hence `attention_probe` is another name of this class.

    Args:
        kind: `"scores"`, before softmax, after scaling and masking; or `"probabilities"`, after softmax and before
            Dropout, rows that add up to 1.

    Inputs:
        - **x** (Tensor) - scores or probabilities, float16, bfloat16, float32 or float64, of any shape with the keys on
          the last axis, such as [batch, heads, queries, keys].

    Outputs:
        The same tensor.

    Raises:
        ValueError: `kind` is neither, or x is a scalar (when the step is compiled or called).
        TypeError: x is not of a float type (when the step is compiled or called).

    Examples:
        In `__init__` of the network's cell, and in its `construct`:

        >>> self.probe = AttentionProbe()                                                        # doctest: +SKIP
        >>> weights = self.softmax(self.probe(ops.matmul(query, key) * scale + mask))            # doctest: +SKIP
    """

    def __init__(self, kind: str = "scores"):
        super().__init__()
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"`kind` must be 'scores' (before softmax) or 'probabilities', but it is {kind!r:.200}. Make the "
                             "probe in __init__, self.probe = AttentionProbe(), and call it in construct: self.probe(scores).")
        self.kind = kind

    def construct(self, x):
        return x


attention_probe = AttentionProbe


@constexpr
def _rows_and_keys(shape: tuple[int, ...]) -> tuple[int, int]:
    if any(length is None or length < 0 for length in shape):
        raise ValueError(f"instrument needs static shapes, but attention scores have shape {shape}, where -1 is a dynamic "
                         "axis. Use attention=False, or do not use set_inputs with None axes.")
    if not shape or not shape[-1]:
        raise ValueError(f"attention is measured over the last axis, the keys, but the shape is {shape}. "
                         "Call the probe on scores such as [batch, heads, queries, keys].")
    return stats.size_of(shape) // shape[-1], shape[-1]


@constexpr
def _calls_and_rows(rows: int) -> Tensor:
    return Tensor([1.0, float(rows)], ms.float32)


@constexpr
def _filled(shape: tuple[int, ...], value: float) -> Tensor:
    return Tensor(np.full(shape, value), ms.float32)


def score_entropies(scores: Tensor, maxima: Tensor) -> Tensor:
    """Entropy of the softmax of each row.

    Args:
        scores: float32 [R, n].
        maxima: Their maxima, float32 [R, 1].

    Returns:
        float32 [R, 1], nats.
    """
    z = _sub(scores, maxima)
    weights = _exp(z)  # NaN where the row has NaN, +inf, or -inf alone: seen in the sum, since a maximum may pass over it
    total = _sum(weights, 1)
    return _sub(_log(total), _div(_sum(_mul(weights, _maximum(z, _UNSEEN)), 1), total))


def probability_entropies(p: Tensor) -> Tensor:
    """-Σ p ln p of each row. Args: p: float32 [R, n]. Returns: float32 [R], nats."""
    ones = _filled(_shape(p), 1.0)
    return _neg(_sum(_mul(p, _log(_select(_equal(p, _ZERO), ones, p))), 1))


def maximum_or_nan(x: Tensor, row_maxima: Tensor) -> Tensor:
    """The largest element, NaN where one is; float32 [1]."""
    nans = _reshape(stats.element_sum(_cast(_is_nan(x), ms.float32)), (1,))
    return _select(_not_equal(nans, _ZERO), _NAN, _reshape(_max(_reshape(row_maxima, (-1,))), (1,)))


class AttentionColumns(nn.Cell):
    """`COLUMNS` of one tensor: of scores all, of probabilities those before `max_logit`."""

    def __init__(self, columns: tuple[str, ...]):
        super().__init__(auto_prefix=False)
        self.is_of_scores = "max_logit" in columns
        self.row_max = ops.ReduceMax(keep_dims=True)

    def construct(self, x):
        rows, keys = _rows_and_keys(_shape(x))
        x = _reshape(stats.as_float32(x), (rows, keys))
        carried = (_calls_and_rows(rows),)
        if self.is_of_scores:
            maxima = self.row_max(x, 1)
            entropy = stats.element_sum(score_entropies(x, maxima))
            carried = carried + (_reshape(entropy, (1,)), maximum_or_nan(x, maxima))
        else:
            carried = carried + (_reshape(stats.element_sum(probability_entropies(x)), (1,)),)
        return _concat(carried)


class _Carrier(PlainCarrier):
    measure = AttentionColumns


class _GatedCarrier(GatedCarrier):
    measure = AttentionColumns


# One carrier serves all taps that carry the same: the compiler then goes through it once for each shape.
_carrier = functools.lru_cache(maxsize=None)(_Carrier)
_gated_carrier = functools.lru_cache(maxsize=None)(_GatedCarrier)


@constexpr
def _check_float(name: str, dtype: Any) -> bool:
    if dtype not in _compat.FLOAT_TYPES:
        raise TypeError(f"the attention probe {name!r} is called on a tensor of type {dtype}, but measures float tensors. "
                        "Call it on scores or probabilities, or use attention=False.")
    return True


class ProbeTap(Tap):
    """Measures what an `AttentionProbe` is called on.

    Args:
        name: The probe's name in `cells_and_names()`.
        kind: The probe's kind.
    """

    group = "attention"
    recipes = _RECIPES

    def __init__(self, name: str, kind: str):
        super().__init__(name, [stat for stat in _RECIPES if stat != "max_logit" or kind == "scores"], False)

    def choose(self, statistics: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(statistics), COLUMNS if "max_logit" in statistics else COLUMNS[:3]

    def make_carrier(self, is_gated: bool) -> nn.Cell:
        return (_gated_carrier if is_gated else _carrier)(self.columns, ())

    def attributes(self, own: Any, gate: Gate) -> dict[str, Any]:
        return {"construct": _TappedProbe.construct, "_instrument_attention_construct": own.construct,
                "_instrument_attention_tap": GatedTap(self, gate)}

    def construct(self, x):
        _check_float(self.cell_name, x.dtype)
        _rows_and_keys(_shape(x))  # here too, so that a wrong shape is refused in the forward
        return self.carrier(x, self.slot, self.flag)


class _TappedProbe:
    def construct(self, x):
        return self._instrument_attention_tap(self._instrument_attention_construct(x))


class Layout(NamedTuple):
    """What of an `nn.MultiheadAttention` its scores depend on, beside tensors."""

    heads: int
    width: int
    batch_first: bool
    is_packed: bool  # query, key and value weights are one parameter
    has_bias: bool
    has_key_bias: bool  # add_bias_kv
    has_zero_key: bool  # add_zero_attn


class _LayerCarrier(nn.Cell):
    """The identity of a layer's output whose backward computes the layer's scores, and returns what is measured of them."""

    def __init__(self, layout: Layout, is_gated: bool):
        super().__init__(auto_prefix=False)
        self.heads, self.width, self.batch_first = layout.heads, layout.width, layout.batch_first
        self.head_width = layout.width // layout.heads
        self.key_row = layout.width if layout.is_packed else 0
        self.has_bias, self.has_key_bias, self.has_zero_key = layout.has_bias, layout.has_key_bias, layout.has_zero_key
        self.scale = Tensor(1 / math.sqrt(self.head_width), ms.float32)
        self.columns = AttentionColumns(COLUMNS)
        self.is_gated = is_gated
        self.threshold = Tensor(0.5, ms.float32)
        self.nothing = Tensor(np.zeros(len(COLUMNS)), ms.float32)
        self.greater = ops.Greater()

    def construct(self, x, query, key, query_weight, key_weight, bias, key_bias, mask, slot, flag):
        return x

    def bprop(self, x, query, key, query_weight, key_weight, bias, key_bias, mask, slot, flag, out, dout):
        if self.is_gated:
            carried = self.nothing
            if self.greater(flag, self.threshold):
                carried = self.columns(self.scores(query, key, query_weight, key_weight, bias, key_bias, mask))
        else:
            carried = self.columns(self.scores(query, key, query_weight, key_weight, bias, key_bias, mask))
        # Nobody asks for the gradients of what is behind a stop_gradient.
        return dout, query, key, query_weight, key_weight, bias, key_bias, mask, carried, flag

    def scores(self, query, key, query_weight, key_weight, bias, key_bias, mask):
        """float32 [batch, heads, queries, keys], after scaling and masking."""
        queries = self.in_heads(query, query_weight, bias, 0, 0)
        keys = self.in_heads(key, key_weight, bias, self.key_row, self.width)
        batch = _shape(keys)[0]
        if self.has_key_bias:
            key_bias = _reshape(stats.as_float32(key_bias), (1, self.heads, 1, self.head_width))
            keys = _concat_keys((keys, _tile(key_bias, (batch, 1, 1, 1))))
        if self.has_zero_key:
            keys = _concat_keys((keys, _filled((batch, self.heads, 1, self.head_width), 0.0)))
        scores = _mul(_matmul_heads(queries, keys), self.scale)
        if len(_shape(mask)) > 0:
            scores = _add(scores, mask)
        return scores

    def in_heads(self, x, weight, bias, row, bias_row):
        """Project `x` by the rows of `weight` from `row` on: float32 [batch, heads, positions, width of a head]."""
        shape = _shape(x)
        weight = _slice(stats.as_float32(weight), (row, 0), (self.width, shape[-1]))
        x = _matmul(_reshape(stats.as_float32(x), (-1, shape[-1])), weight)
        if self.has_bias:
            x = _add(x, _slice(stats.as_float32(bias), (bias_row,), (self.width,)))
        if len(shape) == 2:  # without a batch
            return _transpose(_reshape(x, (1, shape[0], self.heads, self.head_width)), (0, 2, 1, 3))
        x = _reshape(x, (shape[0], shape[1], self.heads, self.head_width))
        if self.batch_first:
            return _transpose(x, (0, 2, 1, 3))
        return _transpose(x, (1, 2, 0, 3))


_layer_carrier = functools.lru_cache(maxsize=None)(_LayerCarrier)


class LayerTap(ProbeTap):
    """Measures the scores of an `nn.MultiheadAttention`.

    Args:
        name: The cell's name in `cells_and_names()`.
        cell: The cell.
    """

    def __init__(self, name: str, cell: Any):
        layout = Layout(cell.num_heads, cell.embed_dim, cell.batch_first, bool(cell._qkv_same_embed_dim),
                        cell.in_proj_bias is not None, cell.bias_k is not None, bool(cell.add_zero_attn))
        object.__setattr__(self, "layout", layout)  # for `make_carrier`; a Cell takes no attribute before it is initialised
        super().__init__(name, "scores")
        self.heads, self.is_packed = layout.heads, layout.is_packed
        self.padding = int(layout.has_key_bias) + int(layout.has_zero_key)
        self.nothing = Tensor(0.0, ms.float32)  # stands for an input that there is not

    def make_carrier(self, is_gated: bool) -> nn.Cell:
        return _layer_carrier(self.layout, is_gated)

    def attributes(self, own: Any, gate: Gate) -> dict[str, Any]:
        return {"construct": _TappedLayer.construct, "_instrument_attention_construct": own.construct,
                "_instrument_attention_tap": GatedTap(self, gate, _PASSING)}

    def construct(self, output, query, key, key_padding_mask, attn_mask, weight, query_weight, key_weight, bias, key_bias):
        if self.is_packed:
            query_weight = weight
            key_weight = weight
        if bias is None:
            bias = self.nothing
        if key_bias is None:
            key_bias = self.nothing
        mask = self.mask(key_padding_mask, attn_mask)
        measured = self.carrier(output[0], _stop(query), _stop(key), _stop(query_weight), _stop(key_weight), _stop(bias),
                                _stop(key_bias), _stop(mask), self.slot, self.flag)
        return (measured,) + output[1:]

    def mask(self, key_padding_mask, attn_mask):
        """What is added to the scores, float32 [batch or 1, heads or 1, queries or 1, keys], or [] where there is no mask."""
        if key_padding_mask is None and attn_mask is None:
            return self.nothing
        if attn_mask is None:
            mask = additive(of_keys(key_padding_mask))
        elif key_padding_mask is None:
            mask = additive(self.of_pairs(attn_mask))
        elif attn_mask.dtype == ms.bool_:
            mask = additive(_logical_or(self.of_pairs(attn_mask), _cast(of_keys(key_padding_mask), ms.bool_)))
        else:
            # MindSpore adds a bool mask of keys to a float mask as 0 and 1.
            mask = _add(additive(self.of_pairs(attn_mask)), stats.as_float32(of_keys(key_padding_mask)))
        if self.padding > 0:
            shape = _shape(mask)
            mask = _concat_last((mask, _filled((shape[0], shape[1], shape[2], self.padding), 0.0)))
        return mask

    def of_pairs(self, mask):
        shape = _shape(mask)
        if len(shape) == 2:
            return _reshape(mask, (1, 1, shape[0], shape[1]))
        return _reshape(mask, (shape[0] // self.heads, self.heads, shape[1], shape[2]))


def of_keys(mask):
    """A mask of keys, [keys] or [batch, keys], in four dimensions."""
    keys = _shape(mask)[-1]
    return _reshape(mask, (-1, 1, 1, keys))


def additive(mask):
    """What a mask adds to the scores: itself where it is of a float type, else -inf where it is true."""
    if mask.dtype == ms.bool_ or mask.dtype == ms.uint8:
        shape = _shape(mask)
        return _select(_cast(mask, ms.bool_), _filled(shape, -math.inf), _filled(shape, 0.0))
    return stats.as_float32(mask)


class _TappedLayer:
    def construct(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
                  average_attn_weights=True):
        output = self._instrument_attention_construct(query, key, value, key_padding_mask, need_weights, attn_mask,
                                                      average_attn_weights)
        return self._instrument_attention_tap(output, query, key, key_padding_mask, attn_mask, self.in_proj_weight,
                                              self.q_proj_weight, self.k_proj_weight, self.in_proj_bias, self.bias_k)


class _Passing(nn.Cell):
    """Stands for a layer's tap while the gate is closed."""

    def construct(self, output, query, key, key_padding_mask, attn_mask, weight, query_weight, key_weight, bias, key_bias):
        return output


_PASSING = _Passing()


def attention_taps(network: nn.Cell) -> list[tuple[str, nn.Cell, Tap]]:
    """Names, cells and taps of what of the attention of `network` can be measured, in the order of `cells_and_names()`.

    A subclass of `nn.MultiheadAttention` with a construct of its own is not: what it does is not known. Give it a probe.
    """
    cells = [(name, cell) for name, cell in _compat.named_cells(network) if isinstance(cell, AttentionProbe)
             or (isinstance(cell, nn.MultiheadAttention) and own_class(cell).construct is nn.MultiheadAttention.construct)]
    return [(name, cell, ProbeTap(name, cell.kind) if isinstance(cell, AttentionProbe) else LayerTap(name, cell))
            for name, cell in measurable(cells)]
