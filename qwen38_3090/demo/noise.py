"""Random tensors with the same bits on every machine."""

import zlib

import numpy as np
import torch


class Noise:
    """Each tensor comes from a stream of its own, named after it: adding one leaves the others as they were.

    The streams are PCG64's raw output, which NumPy promises to keep, and only exact arithmetic follows.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def _bits(self, name: str, count: int) -> np.ndarray:
        return np.random.PCG64([self._seed, zlib.crc32(name.encode())]).random_raw(count)

    def uniform(self, name: str, *shape: int, std: float) -> torch.Tensor:
        """float32 [shape], mean 0, standard deviation `std`."""
        unit = (self._bits(name, int(np.prod(shape))) >> np.uint64(40)).astype(np.float64) / 2**24
        return torch.from_numpy(((unit - 0.5) * (12**0.5 * std)).astype(np.float32)).reshape(shape)

    def signs(self, name: str, *shape: int) -> torch.Tensor:
        """float32 [shape] of -1 and 1."""
        top = (self._bits(name, int(np.prod(shape))) >> np.uint64(63)).astype(np.float32)
        return torch.from_numpy(2 * top - 1).reshape(shape)

    def ranks(self, name: str, count: int) -> torch.Tensor:
        """int64 [count]: the numbers below `count`, shuffled."""
        return torch.from_numpy(np.argsort(self._bits(name, count), kind="stable"))
