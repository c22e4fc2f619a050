"""Compiled loops: arrays in, arrays out; and what all of them share.

``row_products`` and ``ring`` add up rows for every family, in floating point and modulo 2^64;
``exponentials`` is what compiled loops call. ``glm`` and ``penalized`` are rooms of their own,
``responses`` says which values a response may have, and ``multiple_tests`` adjusts p-values. Each of the
others is for one family or two: ``partial_likelihood`` (Cox), ``lifetimes`` (accelerated failure times),
``treatment`` (effects of a treatment), ``categories`` (ordinal and multinomial), ``clusters`` (estimating
equations), ``absorption`` (effects of many levels), ``mixed_effects``, ``curves`` and ``boosting``,
``split_networks`` (LASER), ``latent_factors`` and ``item_responses`` (M2-SEM), ``copula`` and
``discrete_gaussian`` (synthesis), ``sketch`` (VFEM). ``compiled`` lists what was compiled on this machine.
"""

from typing import Any

import numpy as np
from numba.core import event

from fedstat.progress_line import report_compiling
from fedstat.typing import Array

REORDER = {"reassoc", "contract", "nsz"}
"""Floating-point options of the compiler to vectorize sums; it must not assume finite numbers."""

INNER: dict[str, Any] = {"no_cpython_wrapper": True}
"""Options of a function that only compiled ones call; a call from Python would crash."""


def as_kernel_array(a: Array, dtype: type = np.float64) -> Array:
    """Return the array in the single type of the compiled loops, with a copy only if it differs."""
    ready = isinstance(a, np.ndarray) and a.dtype == dtype and a.flags.c_contiguous and a.flags.aligned
    if ready and not a.flags.writeable:
        return a
    view = a.view() if ready else np.require(a, dtype, ["C", "A"]).view()
    # Whether an array is writable is part of its type for the compiler: two types, two compilations.
    view.flags.writeable = False
    return view


class _Compiling(event.Listener):
    """Says on the progress line that a loop is compiled, which happens once on a machine."""

    def on_start(self, event: Any) -> None:
        report_compiling()

    def on_end(self, event: Any) -> None:
        """Write nothing: the next step of the computation writes the line again."""


event.register("numba:compile", _Compiling())  # type: ignore[no-untyped-call]
