"""NumPy float64 twins, written from the definitions and independently of the package."""
from __future__ import annotations

import numpy as np


def norm(*arrays):
    """Root of the sum of all squares."""
    return np.sqrt(sum(np.sum(np.square(np.asarray(a, np.float64))) for a in arrays))


def activation(x):
    """Every statistic of one output of a cell."""
    x = np.asarray(x, np.float64)
    return {"count": 1.0, "mean": x.mean(), "rms": np.sqrt(np.mean(x ** 2)), "absmax": np.abs(x).max(),
            "nonfinite": float(not np.isfinite(x).all()), "zero_fraction": np.mean(x == 0),
            "nonfinite_elements": float(np.sum(~np.isfinite(x)))}


class MLP:
    """Float64 twin of `networks.MLP`: forward, backward, and what every layer puts out."""

    def __init__(self, parameters):
        self.w1, self.b1, self.w2, self.b2 = (np.array(p, np.float64) for p in parameters)

    def step(self, x, y):
        """Returns (loss, gradients in the order of the parameters, outputs by cell, gradients of outputs by cell)."""
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        first = x @ self.w1.T + self.b1
        act = np.maximum(first, 0)
        second = act @ self.w2.T + self.b2
        error = second - y
        d_second = 2 * error / error.size
        d_act = d_second @ self.w2
        d_first = d_act * (first > 0)
        gradients = [d_first.T @ x, d_first.sum(0), d_second.T @ act, d_second.sum(0)]
        return (np.mean(error ** 2), gradients, {"first": first, "act": act, "second": second},
                {"first": d_first, "act": d_act, "second": d_second})


def entropy(p):
    """Mean over rows of -Σ p ln p, in nats."""
    rows = np.asarray(p, np.float64).reshape(-1, np.shape(p)[-1])
    return float(np.mean([-sum(q * np.log(q) for q in row if q > 0) for row in rows]))


def attention(scores):
    """Largest score, and entropy of the softmax over the last axis."""
    scores = np.asarray(scores, np.float64)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return {"max_logit": scores.max(), "entropy": entropy(p / p.sum(-1, keepdims=True))}


def attention_scores(weights, heads, query, key, batch_first=True, pairs=None, keys=None, has_zero_key=False):
    """Scores of `nn.MultiheadAttention`, head by head; `pairs` and `keys` are true where there is no attention."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    if query.ndim == 2:
        query, key = query[None], key[None]
    elif not batch_first:
        query, key = query.swapaxes(0, 1), key.swapaxes(0, 1)
    width = query.shape[-1]
    if weights["in_proj_weight"] is not None:
        query_weight, key_weight = weights["in_proj_weight"][:width], weights["in_proj_weight"][width:2 * width]
    else:
        query_weight, key_weight = weights["q_proj_weight"], weights["k_proj_weight"]
    bias = np.zeros(3 * width) if weights["in_proj_bias"] is None else weights["in_proj_bias"].astype(np.float64)
    scores = []
    for q, k, left_out in zip(query, key, [None] * len(query) if keys is None else keys):
        q, k = q @ query_weight.T + bias[:width], k @ key_weight.T + bias[width:2 * width]
        hidden = np.zeros((len(q), len(k)), bool)
        if pairs is not None:
            hidden |= pairs
        if left_out is not None:
            hidden |= left_out[None]
        for more in [weights["bias_k"]] * (weights["bias_k"] is not None) + [np.zeros(width)] * has_zero_key:
            k = np.concatenate([k, np.reshape(more, (1, width))])
            hidden = np.pad(hidden, ((0, 0), (0, 1)))
        for q_head, k_head in zip(np.split(q, heads, 1), np.split(k, heads, 1)):
            scores.append(np.where(hidden, -np.inf, q_head @ k_head.T / np.sqrt(width / heads)))
    return np.stack(scores)
