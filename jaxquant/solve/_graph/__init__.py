# SPDX-License-Identifier: Apache-2.0
"""A program as a graph: where factors, rotations and biases of channels can be folded into parameters."""
