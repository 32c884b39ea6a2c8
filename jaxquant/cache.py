# SPDX-License-Identifier: Apache-2.0
"""Quantized arrays that are written and read in parts, by the names of `jax.numpy` and `jax.lax`."""

from ._cache import dynamic_slice as dynamic_slice
from ._cache import update_slice as update_slice
from ._cache import zeros as zeros
