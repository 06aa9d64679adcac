"""When requests are sent."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(n: int, *, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds after the start at which each of `n` requests is sent; the last is exactly `n / rate`.

    Waits are drawn from a gamma distribution of shape `burstiness` (1: a Poisson process; inf: constant), summed
    beforehand and rescaled, so that neither chance nor the time that sending takes changes the rate.
    `rate` inf: all at 0.
    """
    if math.isinf(rate):
        return [0.0] * n
    if math.isinf(burstiness):
        waits = np.ones(n)
    else:
        waits = np.random.default_rng(seed).gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=n)
    times = np.cumsum(waits)
    if times[-1] <= 0.0:  # a shape near 0 can draw nothing but zeros
        times = np.cumsum(np.ones(n))
    times *= (n / rate) / times[-1]
    return [float(t) for t in times]
