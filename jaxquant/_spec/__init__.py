# SPDX-License-Identifier: Apache-2.0
"""What to quantize to: formats, granularities, specs and rules. All of it static and hashable; no arrays."""
