# SPDX-License-Identifier: Apache-2.0
"""Files of quantized checkpoints: containers, formats, families."""
