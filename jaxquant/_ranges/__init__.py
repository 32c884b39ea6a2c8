# SPDX-License-Identifier: Apache-2.0
"""From data to a range, from a range to the scale and zero point: pure functions over small pytrees."""
