# SPDX-License-Identifier: Apache-2.0
"""Weights that are rounded by what their layers make of the error, or made easier to round, without training."""

from ._adaround import adaround as adaround
from ._bias_correct import bias_correct as bias_correct
from ._choose_bits import choose_bits as choose_bits
from ._equalize import equalize as equalize
from ._fold_norms import fold_norms as fold_norms
from ._gains import with_gains as with_gains
from ._gptq import gptq as gptq
from ._low_rank import low_rank as low_rank
from ._ranges import ranges as ranges
from ._rotate import rotate as rotate
from ._rotation import with_rotation as with_rotation
from ._smooth import smooth as smooth
