"""Type aliases for the arrays that pass between modules."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]
Array: TypeAlias = NDArray[Any]

# Shapes are held against each other where a record is read, see fedstat.codec.
Vector: TypeAlias = Annotated[Floats, "p"]
Matrix: TypeAlias = Annotated[Floats, "p p"]
