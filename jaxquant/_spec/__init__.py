# SPDX-License-Identifier: Apache-2.0
"""Static descriptions of quantization: formats, granularities, specs and rules. Hashable; no arrays."""
