# SPDX-License-Identifier: Apache-2.0
"""Comparison of bits, and the context in which float64 exists."""

import jax
import numpy as np


def differing(got, want) -> int:
    """How many values differ in a bit, zero signs included; a NaN equals a NaN. Dtype and shape must be equal."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    unsigned = f"u{got.dtype.itemsize}"
    both_nan = (got != got) & (want != want)
    return int(((got.view(unsigned) != want.view(unsigned)) & ~both_nan).sum())


def assert_same_bits(got, want, what="") -> None:
    count = differing(got, want)
    assert count == 0, f"{what}: {count} of {np.size(want)} differ\n{got}\n{want}"


def x64(enabled: bool = True):
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    from jax.experimental import enable_x64  # jax < 0.8

    return enable_x64(enabled)
