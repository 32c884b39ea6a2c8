# SPDX-License-Identifier: Apache-2.0
"""Every primitive of a table with all of its parameters, as this version of jax has them."""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from inputs import ones
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxquant import quantize_fn, solve, weight_spec
from jaxquant._contract._ops import OPS
from jaxquant._program._jaxpr import known_params, params_of, programs
from jaxquant._program._moves import MOVES
from jaxquant.solve._graph import _classes, _transfer
from jaxquant.solve._graph._graph import Graph

X, INDICES, B = (jax.device_put(np.full((4, 6), *of)) for of in ((1, np.float32), (0, np.int32), (True, bool)))
SUMS = "add", "sub", "mul", "div", "max", "min", "pow", "eq", "ne", "lt", "le", "gt", "ge"
OF_ONE = "neg", "abs", "sign", "is_finite", "exp", "log", "logistic", "rsqrt", "sqrt", "tanh", "square", "cumsum"
OF_ONE = *OF_ONE, "cummax", "cummin", "log1p"
MESH = lambda kind="Auto": jax.make_mesh((4,), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))


def shard_mapped(f, **kw):
    return jax.shard_map(f, mesh=MESH(), in_specs=P(), out_specs=P("d"), **kw)


def on_explicit(f):
    with jax.set_mesh(MESH("Explicit")):
        return jax.make_jaxpr(f)(X)


def window(reduce, start):
    return lambda x: lax.reduce_window(x, np.float32(start), reduce, (1, 2), (1, 1), "VALID")


PAIRS = {name: lambda x, name=name: getattr(lax, name)(x, x) for name in SUMS}
SAMPLES = {
    **PAIRS,
    **{name: lambda x, name=name: getattr(lax, name)(x) for name in OF_ONE},
    "add_any": jax.grad(lambda x: (x * x + jnp.sin(x)).sum()),
    "and": lambda x: lax.bitwise_and(B, x > 0), "or": lambda x: lax.bitwise_or(B, x > 0),
    "not": lambda x: lax.bitwise_not(x > 0),
    "integer_pow": lambda x: x**3, "select_n": lambda x: lax.select(x > 0, x, x),
    "transpose": lambda x: x.T, "reshape": lambda x: lax.reshape(x, (6, 4), (1, 0)),
    "squeeze": lambda x: lax.squeeze(x[:1], (0,)), "broadcast_in_dim": lambda x: lax.broadcast(x, (2,)),
    "rev": lambda x: lax.rev(x, (0,)), "slice": lambda x: lax.slice(x, (0, 1), (4, 5), (1, 2)),
    "split": lambda x: lax.split(x, (2, 2)), "tile": lambda x: lax.tile(x, (2, 1)),
    "unstack": lambda x: getattr(lax, "unstack")(x), "stack": lambda x: getattr(lax, "stack")([x, x]),  # noqa: B009
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (INDICES[0, 0], INDICES[0, 1]), (2, 6)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:1], (INDICES[0, 0], INDICES[0, 1])),
    "gather": lambda x: x[INDICES[0]],
    "scatter": lambda x: x.at[INDICES[0]].set(1.0), "scatter-add": lambda x: x.at[INDICES[0]].add(1.0),
    "sort": lambda x: lax.sort((x, x), num_keys=1),
    "pad": lambda x: lax.pad(x, 0.0, [(1, 0, 0), (0, 0, 0)]), "concatenate": lambda x: lax.concatenate([x, x], 0),
    "copy": lambda x: jnp.array(x), "name": lambda x: jax.ad_checkpoint.checkpoint_name(x, "a"),
    "stop_gradient": lax.stop_gradient, "optimization_barrier": lax.optimization_barrier,
    "device_put": lambda x: jax.device_put(x, jax.devices()[0]),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "sharding_constraint": lambda x: lax.with_sharding_constraint(x, jax.NamedSharding(MESH(), P("d"))),
    "reshard": lambda _: on_explicit(lambda x: jax.sharding.reshard(x, P("d"))),
    "pvary": shard_mapped(lambda x: x + lax.axis_index("d").astype(x.dtype)),
    "pcast": shard_mapped(lambda x: lax.pcast(x, "d", to="varying")),
    "ppermute": shard_mapped(lambda x: lax.ppermute(x + lax.axis_index("d").astype(x.dtype), "d", [(0, 1)])),
    "all_gather": shard_mapped(lambda x: lax.all_gather(x, "d", tiled=True), check_vma=False),
    "reduce_sum": lambda x: x.sum(0), "reduce_max": lambda x: x.max(0), "reduce_min": lambda x: x.min(0),
    "argmax": lambda x: lax.argmax(x, 0, jnp.int32), "argmin": lambda x: lax.argmin(x, 0, jnp.int32),
    "reduce_window_sum": window(lax.add, 0), "reduce_window_max": window(lax.max, -np.inf),
    "reduce_window_min": window(lax.min, np.inf),
    "dot_general": lambda x: x @ x.T,
    "ragged_dot_general": lambda x: lax.ragged_dot(x, jnp.ones((2, 6, 3)), INDICES[0, :2]),
    "conv_general_dilated": lambda x: lax.conv(x[None, None], jnp.ones((1, 1, 2, 2)), (1, 1), "SAME"),
}  # fmt: skip
TABLES = {*MOVES, *OPS, *_transfer.TRANSFERS, *_classes.TRANSFERS}
# Not in a program that this version of jax traces: of an older or a newer one, or of no public function.
ABSENT = {"mesh_cast"}


def equations(jaxpr, name):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield eqn
        for inner, _ in programs(eqn):
            yield from equations(inner, name)


@pytest.mark.parametrize("name", sorted(TABLES - ABSENT))
def test_all_parameters_are_known(name):
    try:
        made = SAMPLES[name](X) if name == "reshard" else jax.make_jaxpr(SAMPLES[name])(X)
    except AttributeError as error:
        pytest.skip(f"{error} in jax {jax.__version__}")
    found = list(equations(made.jaxpr, name))
    if not found:
        assert name in ("pvary", "pcast", "stop_gradient", "copy", "tile", "square"), f"no {name} in {made}"
    for eqn in found:
        assert set(params_of(eqn)) <= known_params(name), f"{name} has {set(params_of(eqn)) - known_params(name)}"


def test_a_parameter_that_no_table_reads_is_refused():
    """A move of a quantized weight, and what a factor would pass, by a product of another dtype."""
    gathered = lambda params, x: x @ lax.all_gather(params["w"], "d", axis_index_groups=[[0, 1], [2, 3]], tiled=True)
    mesh, params = MESH(), {"w": ones((2, 3))}
    f = jax.shard_map(gathered, mesh=mesh, in_specs=(P(), P()), out_specs=P("d"), check_vma=False)
    with pytest.raises(NotImplementedError, match=r"axis_index_groups=.* of the primitive 'all_gather'.*'w'"):
        quantize_fn(f, [("w", weight_spec(8))])(params, X[:, :4])


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="lax.mul has no out_dtype")
def test_a_factor_passes_no_product_of_another_dtype():
    product = lambda a, b: jax.lax.mul_p.bind(a, jnp.broadcast_to(b, a.shape), out_dtype=jnp.dtype(jnp.float32))
    f = lambda params, x: product(x, params["g"]) @ params["w"]
    params, x = {"g": ones(6), "w": ones((6, 3))}, X
    q = quantize_fn(f, [("w", weight_spec(8))])
    with pytest.raises(ValueError, match="mul"):
        solve.smooth(params, q, q.observe(params, x, gram=True), x, unfolded="error")
    assert any(
        " with out_dtype" in node.name for node in Graph(jax.make_jaxpr(f)(params, x).jaxpr, ["g", "w", None]).nodes
    )
