# SPDX-License-Identifier: Apache-2.0
"""Variants of a function for one platform, with the bits of the plain program."""
