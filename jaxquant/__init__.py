# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training for JAX as pure functions."""

from . import tf as tf
from ._affine import QArray as QArray
from ._affine import dequantize as dequantize
from ._affine import fake_quant as fake_quant
from ._affine import pack as pack
from ._affine import quantize as quantize
from ._affine import scale_gradient as scale_gradient
from ._affine import unpack as unpack
from ._files import load as load
from ._files import save as save
from ._integer import conv_general_dilated as conv_general_dilated
from ._integer import dot_general as dot_general
from ._ranges._fit import fit_qparams as fit_qparams
from ._ranges._histogram import Histogram as Histogram
from ._ranges._histogram import histogram as histogram
from ._ranges._histogram import merge_histograms as merge_histograms
from ._ranges._histogram import range_from_histogram as range_from_histogram
from ._ranges._range import QParams as QParams
from ._ranges._range import Range as Range
from ._ranges._range import calibrate as calibrate
from ._ranges._range import ema_ranges as ema_ranges
from ._ranges._range import merge_ranges as merge_ranges
from ._ranges._range import qparams_from_range as qparams_from_range
from ._spec import PerBlock as PerBlock
from ._spec import PerChannel as PerChannel
from ._spec import PerTensor as PerTensor
from ._spec import QuantSpec as QuantSpec
from ._spec import activation_spec as activation_spec
from ._spec import weight_spec as weight_spec
from ._tree import Rule as Rule
from ._tree import dequantize_params as dequantize_params
from ._tree import fake_quant_params as fake_quant_params
from ._tree import init_qparams as init_qparams
from ._tree import match_rules as match_rules
from ._tree import quantize_params as quantize_params
