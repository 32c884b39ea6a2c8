# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling of gradients: histories of their largest magnitudes, as state of the train step."""

from ._history import DelayedQParams as DelayedQParams
from ._history import GradientHistory as GradientHistory
from ._history import delayed_qparams as delayed_qparams
from ._history import split_histories as split_histories
from ._history import update_histories as update_histories
