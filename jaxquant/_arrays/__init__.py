# SPDX-License-Identifier: Apache-2.0
"""Quantized arrays and their qparams: from data to a range, to a scale, to integers and back."""
