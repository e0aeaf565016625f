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
