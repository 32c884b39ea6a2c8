# SPDX-License-Identifier: Apache-2.0
"""The static fields of QArrays and QParams as JSON: for files, and for exported programs that take and return them."""

import json
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from .._spec._granularity import Granularity
from .._spec._spec import QuantSpec
from ._qarray import Frozen, QArray, Static
from ._qparams import Log2QParams, QParams


def spec_to_json(spec: QuantSpec) -> dict[str, Any]:
    """The spec as what JSON can hold."""
    fields = {name: getattr(spec, name) for name in ("bits", "signed", "symmetric", "narrow_range", "rounding")}
    for name in (
        "format",
        "scale_dtype",
        "scale_rule",
        "offset",
        "exact_divisor",
    ):  # not of those before: their files stay
        if getattr(spec, name) != QuantSpec.__dataclass_fields__[name].default:
            fields[name] = getattr(spec, name)
    if spec.scale_spec is not None:
        fields["scale_spec"] = spec_to_json(spec.scale_spec)
    return fields | spec.granularity.to_json()


def spec_from_json(fields: dict[str, Any]) -> QuantSpec:
    """The spec of which `spec_to_json` gave the fields."""
    fields = dict(fields)
    if "scale_spec" in fields:
        fields["scale_spec"] = spec_from_json(fields["scale_spec"])
    return QuantSpec(granularity=Granularity.from_json(fields), **fields)


def spec_to_bytes(spec: QuantSpec | None) -> bytes:
    """The JSON of a spec, or of None, in an exported program."""
    return json.dumps(spec and spec_to_json(spec)).encode()


def spec_from_bytes(data: bytes) -> QuantSpec | None:
    """The inverse of `spec_to_bytes`."""
    fields = json.loads(data)
    return fields and spec_from_json(fields)


def frozen_to_json(frozen: Frozen) -> dict[str, Any]:
    """The fields of a Frozen, as JSON can hold them."""
    return frozen._asdict() | {"activation": frozen.activation and spec_to_json(frozen.activation)}


def frozen_from_json(said: dict[str, Any] | None) -> Frozen | None:
    """The Frozen that `frozen_to_json` was given."""
    if said is None:
        return None
    activation = said["activation"] and spec_from_json(said["activation"])
    flags = bool(said["from_qparams"]), bool(said["static_inputs"])
    return Frozen(tuple(said["shape"]), *flags, activation)


def _static_to_bytes(static: Static) -> bytes:
    said = {"spec": spec_to_json(static.spec), "dtype": str(jnp.dtype(static.dtype)), "order": static.order}
    frozen = static.frozen and frozen_to_json(static.frozen)
    return json.dumps(said | {"frozen": frozen, "summed": static.summed, "pairs": static.pairs}).encode()


def _static_from_bytes(data: bytes) -> Static:
    said = json.loads(data)
    order, pairs = (said.get(name) and tuple(said[name]) for name in ("order", "pairs"))
    spec, dtype = spec_from_json(said["spec"]), jnp.dtype(said["dtype"])
    return Static(spec, dtype, order, frozen_from_json(said["frozen"]), said["summed"], pairs)


jax.export.register_pytree_node_serialization(
    QArray,
    serialized_name="jaxquant.QArray",
    serialize_auxdata=_static_to_bytes,
    deserialize_auxdata=_static_from_bytes,
)
for _kind in (QParams, Log2QParams):
    jax.export.register_pytree_node_serialization(
        _kind,
        serialized_name=f"jaxquant.{_kind.__name__}",
        serialize_auxdata=spec_to_bytes,
        deserialize_auxdata=spec_from_bytes,
    )
