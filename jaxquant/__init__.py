# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training for JAX as pure functions."""

from . import tf as tf
