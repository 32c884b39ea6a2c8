# SPDX-License-Identifier: Apache-2.0
"""Contractions of quantized arrays: the exact integer contraction, scaled once."""
