# SPDX-License-Identifier: Apache-2.0
"""Quantized functions as LiteRT models: `pip install 'jaxquant[litert]'`."""

from ._export._litert import export as export
