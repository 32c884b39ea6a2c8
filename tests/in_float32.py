# SPDX-License-Identifier: Apache-2.0
"""An oracle of integer products, `execution="float32"`: of integers in float32, in chunks whose sums are exact."""

import math

import jax.numpy as jnp
from jax import lax

from jaxquant._arrays._codes import centred, largest_magnitude
from jaxquant._contract import _conv, _dot
from jaxquant._contract._lowering import Lowering, check_int32

EXACT = 2**24  # float32 holds every integer up to it


def fitting(a, b):
    """How many products of two specs float32 adds up exactly."""
    largest = largest_magnitude(a) * largest_magnitude(b)
    if largest > EXACT:
        raise ValueError(f'`execution="float32"` holds no products of {a} and {b}. Pass execution="int8".')
    return EXACT // largest


def check_float32(length, a, b):
    check_int32(length, a, b)
    fitting(a, b)


def chunks(length, size):
    return [(start, min(start + size, length)) for start in range(0, max(length, 1), size)]


def of_dot(op, a, b, length):
    """With the batch first and one contracted axis, the last."""
    rows = []
    for side, q in enumerate((a, b)):
        kept = [*op.batch[side], *op._free(q.ndim, side)]
        v = lax.transpose(centred(q, jnp.float32), (*kept, *op.contracted[side]))
        rows.append(v.reshape([*v.shape[: len(kept)], length]))
    batch, total = tuple(range(len(op.batch[0]))), 0
    for start, end in chunks(length, fitting(a.spec, b.spec)):
        x, w = (v[..., start:end] for v in rows)
        numbers = ((x.ndim - 1,), (w.ndim - 1,)), (batch, batch)
        total = total + lax.dot_general(x, w, numbers, lax.Precision.HIGHEST, jnp.float32).astype(jnp.int32)
    return jnp.asarray(total)


def of_conv(op, a, b, length):
    """In chunks of the input features of each group, of which a window must fit."""
    (_, feature, *_), (_, inner, *window) = op.dimensions.lhs_spec, op.dimensions.rhs_spec
    x, w = centred(a, jnp.float32), centred(b, jnp.float32)
    size, features = fitting(a.spec, b.spec) // max(math.prod(w.shape[i] for i in window), 1), w.shape[inner]
    x = x.reshape(*x.shape[:feature], op.feature_groups, features, *x.shape[feature + 1 :])
    total = 0
    for start, end in chunks(features, size):
        part = lax.slice_in_dim(x, start, end, axis=feature + 1)
        part = part.reshape(*part.shape[:feature], -1, *part.shape[feature + 2 :])
        kernel = lax.slice_in_dim(w, start, end, axis=inner)
        y = lax.conv_general_dilated(part, kernel, **op._params, precision=lax.Precision.HIGHEST)
        total = total + y.astype(jnp.int32)
    return jnp.asarray(total)


_dot.LOWERINGS["float32"] = Lowering(of_dot, check_float32)
_conv.LOWERINGS["float32"] = Lowering(of_conv, check_float32)
