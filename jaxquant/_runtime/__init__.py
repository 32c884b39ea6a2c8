# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the runtimes that serve a model, bit for bit: ONNX Runtime and LiteRT."""
