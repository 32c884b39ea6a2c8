# SPDX-License-Identifier: Apache-2.0
"""The ground floor: checks, gradient rules, groups, axes by name, meshes, and rounding."""
