# SPDX-License-Identifier: Apache-2.0
"""quantize_fn: the plan of a function's sites, and the function with them quantized."""
