# SPDX-License-Identifier: Apache-2.0
"""The version, which the build reads here."""

__version__ = "1.0.0"
