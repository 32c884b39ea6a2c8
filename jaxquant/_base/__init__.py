# SPDX-License-Identifier: Apache-2.0
"""What everything else stands on: checks, gradient rules, groups, axes by name, meshes, and rounding."""
