# SPDX-License-Identifier: Apache-2.0
"""Quantized functions as ONNX models: `pip install 'jaxquant[onnx]'`."""

from ._export._onnx import export as export
