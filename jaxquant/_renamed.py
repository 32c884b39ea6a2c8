# SPDX-License-Identifier: Apache-2.0
"""Names of the root that 0.9 had: an old one raises an error with the new one."""

_MOVED = {
    "cache": ("zeros", "dynamic_slice", "update_slice"),
    "delayed": ("DelayedQParams", "GradientHistory", "delayed_qparams", "split_histories", "update_histories"),
    "solve": ("choose_bits",),
    "typing": ("Gram", "Histogram", "Log2QParams", "Op", "Plan", "QuantizedFunction", "Report", "ReportRow", "Site"),
}
_NOW = {name: f"{space}.{name}" for space, names in _MOVED.items() for name in names}
_NOW |= dict.fromkeys(("merge_ranges", "merge_histograms", "merge_grams"), "merge")


def __getattr__(name: str):
    now = f" It is jaxquant.{_NOW[name]} now." if name in _NOW else ""
    raise AttributeError(f"module 'jaxquant' has no attribute {name!r}.{now}")
