# SPDX-License-Identifier: Apache-2.0
"""The ops that take the place of contractions in a program."""

from .._spec import _rule as rules
from ._contract import ContractionOp
from ._conv import Conv
from ._dot import Dot
from ._ragged import Ragged

OPS: dict[str, type[ContractionOp]] = rules.OPS  # by the names of jax's primitives, which rules know, too
OPS |= {"dot_general": Dot, "conv_general_dilated": Conv, "ragged_dot_general": Ragged}
