# SPDX-License-Identifier: Apache-2.0
"""The ops that take the place of contractions in a program."""

from ._contract import ContractionOp
from ._conv import Conv
from ._dot import Dot
from ._ragged import Ragged

OPS: dict[str, type[ContractionOp]] = {  # by the names of jax's primitives
    "dot_general": Dot,
    "conv_general_dilated": Conv,
    "ragged_dot_general": Ragged,
}
