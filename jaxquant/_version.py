# SPDX-License-Identifier: Apache-2.0
"""The version, which the build reads here."""

__version__ = "0.9.0"
