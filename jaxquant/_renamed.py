# SPDX-License-Identifier: Apache-2.0
"""Names of the root that have changed, until 1.0: an old one raises an error with the new one."""

_NOW = {"merge_ranges": "merge", "merge_histograms": "merge", "merge_grams": "merge"}


def __getattr__(name: str):
    now = f" It is jaxquant.{_NOW[name]} now." if name in _NOW else ""
    raise AttributeError(f"module 'jaxquant' has no attribute {name!r}.{now}")
