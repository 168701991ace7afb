"""Arrays of a policy that outlive it, as those of a tier on disk do."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


class KeptArrays:
    """An `ArraySource` that gives the same array again under the same name."""

    def __init__(self) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {}

    def __call__(self, name: str, length: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
        """The array as it was left."""
        array = self.arrays.setdefault(name, np.zeros(length, dtype))
        assert len(array) == length and array.dtype == dtype
        return array

    def damage(self, rng: random.Random, names: Iterable[str] | None = None) -> None:
        """Anything may stand in these arrays afterwards, or in all."""
        for name in [*self.arrays] if names is None else names:
            array = self.arrays[name]
            array[:] = np.frombuffer(rng.randbytes(array.nbytes), array.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())
