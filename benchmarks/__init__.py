# SPDX-License-Identifier: Apache-2.0
"""What jaxquant costs: `python -m benchmarks` measures every table of docs/measured.md."""
