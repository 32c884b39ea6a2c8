# SPDX-License-Identifier: Apache-2.0
"""Narrow floats as they are, for the products of a device: added up in float32, in an order of its own."""

from collections.abc import Sequence

from .._qarray import QArray, groups_of
from .._spec import QuantSpec

_DTYPES = "float8_e4m3fn", "float8_e5m2"  # those that devices multiply


def is_of_floats(execution: str, spec: QuantSpec) -> bool:
    """Whether what is rounded to `spec` is multiplied as floats, in which a NaN is a NaN, and needs no flag."""
    return execution == "native" and spec.dtype in _DTYPES


def is_native(execution: str, a: QArray, b: QArray, axes: tuple[Sequence[int], Sequence[int]]) -> bool:
    """Whether two operands, contracted along these axes, are multiplied as they are. Two of integers stay exact."""
    if execution != "native" or not (a.spec.format or b.spec.format):
        return False
    for q, contracted in zip((a, b), axes, strict=True):
        if q.spec.dtype not in _DTYPES:
            raise ValueError(
                f'`execution="native"` multiplies {" and ".join(_DTYPES)}, which devices do, got {q.spec}. Quantize '
                'both operands by float8_spec(), or pass execution="auto", which is exact for every format.'
            )
        if q.tensor_scale is not None or any(groups_of(q)[i] > 1 for i in contracted):
            raise ValueError(
                '`execution="native"` has one product for all that is contracted, and so one scale along it, got '
                f'{q.spec}. Share the scale there, as float8_spec() does, or pass execution="auto".'
            )
    return True
