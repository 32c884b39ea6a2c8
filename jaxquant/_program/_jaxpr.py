# SPDX-License-Identifier: Apache-2.0
"""Jaxprs: the equations of a program, the programs inside them, and the evaluation of one equation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._contract._ops import OPS

Location = tuple[int, ...]  # the place of an equation in a program; then which program inside it, the place there, ...
NAME = "name"  # the primitive of checkpoint_name
POINT = "jaxquant"  # what `quant_point` puts before the name of a checkpoint_name
HIJAX = "call_hi_primitive"  # what jax.experimental.hijax makes primitives of
# Contractions, or kernels that may hold one, which cannot be replaced from outside.
CLOSED = ("pallas_call", "ffi_call", "scaled_matmul_wrapper", "scaled_dot")


class Call(NamedTuple):
    """A primitive of jax that holds programs: what a walk and an evaluation make of it.

    Attributes:
      walk: (walk, eqn, origins of the operands, place) -> those of the results.
      evaluate: (replacements, step) -> the results, where one of the programs holds something to replace.
      is_through: whether its results are those of its program: one value inside and outside.
    """

    walk: Callable[..., Sequence[Any]]
    evaluate: Callable[..., Sequence[Any]]
    is_through: bool = False


class Typed(NamedTuple):
    """The type of a variable, in its place."""

    aval: Any


class Equation(NamedTuple):
    """An equation without its variables, equal to those that do the same."""

    primitive: Any
    items: tuple[tuple[str, Any], ...]
    invars: tuple[Typed, ...]
    outvars: tuple[Typed, ...]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "Equation":
        types = (tuple(map(Typed, avals(of))) for of in (eqn.invars, eqn.outvars))
        return cls(eqn.primitive, tuple(eqn.params.items()), *types)

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.items)


def traced(f: Callable, args: Sequence[Any]) -> tuple[Jaxpr, Sequence[Any]]:
    """The program of a function of a list of arrays, and its constants."""
    return opened(jax.make_jaxpr(f)(args))


def opened(program: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A program and its constants; jax 0.11 made one type of the closed and the open one."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def programs(eqn: JaxprEqn) -> list[tuple[Jaxpr, Sequence[Any]]]:
    """Those in the parameters of an equation, found by value: `cond` keeps its under `branches`."""
    if eqn.primitive.name == HIJAX:
        applied = _of_hijax(eqn)
        expand = lambda *ins: jax.tree.leaves(applied.expand(*jax.tree.unflatten(applied.in_tree, ins)))
        return [opened(jax.make_jaxpr(expand)(*avals(eqn.invars)))]
    values = [v for value in eqn.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    return [opened(v) for v in values if isinstance(getattr(v, "jaxpr", v), Jaxpr)]


def _of_hijax(eqn: JaxprEqn) -> Any:
    """The object that an equation of `jax.experimental.hijax` applies: its one parameter, under changing names."""
    (primitive,) = eqn.params.values()
    return primitive


def params_of(eqn: JaxprEqn) -> Mapping[str, Any]:
    """The parameters of an equation; a primitive of hijax has them in its object."""
    return _of_hijax(eqn).params if eqn.primitive.name == HIJAX else eqn.params


def kind(eqn: JaxprEqn) -> str:
    """The name of the primitive; of one of hijax what the public function that made it is called otherwise."""
    is_checkpoint = eqn.primitive.name == HIJAX and {"policy", "prevent_cse"} <= set(params_of(eqn))
    return "checkpoint" if is_checkpoint else eqn.primitive.name


def is_contraction(name: str, params: Mapping[str, Any]) -> bool:
    """Whether it is one that can be replaced."""
    return name in OPS and OPS[name].can_replace(params)


def param(eqn: JaxprEqn, *names: str) -> Any:
    """A parameter of an equation, whose name may have changed between versions of jax."""
    params = params_of(eqn)
    for name in names:
        if name in params:
            return params[name]
    raise NotImplementedError(
        f"jaxquant does not know the parameters of the primitive {eqn.primitive.name!r} in jax {jax.__version__}: got "
        f"{sorted(params)}, expected one of {names}. Use a version of jax that the README says was tested, and report "
        "this one."
    )


# The parameters of primitives that the tables read, or that change nothing of what they say. Others must be at their
# default: a table that does not read a parameter would be wrong in silence.
_READ = {
    "all_gather": "all_gather_dimension axis_name axis_size tiled",
    **dict.fromkeys(("argmax", "argmin"), "axes index_dtype"),
    "broadcast_in_dim": "broadcast_dimensions shape sharding",
    "concatenate": "dimension",
    "conv_general_dilated": "batch_group_count dimension_numbers feature_group_count lhs_dilation out_sharding padding "
    "precision preferred_element_type rhs_dilation window_strides",
    "convert_element_type": "new_dtype sharding weak_type",
    **dict.fromkeys(("cumsum", "cummax", "cummin"), "axis reverse"),
    "device_put": "copy_semantics devices srcs",
    "dot_general": "dimension_numbers out_sharding precision preferred_element_type",
    "dynamic_slice": "slice_sizes",
    "gather": "dimension_numbers fill_value indices_are_sorted mode slice_sizes unique_indices",
    "integer_pow": "y",
    "mesh_cast": "dst_sharding",
    "name": "name",
    "pad": "padding_config",
    "pcast": "axes from_ src to",
    "ppermute": "axis_name perm",
    "pvary": "axes",
    "ragged_dot_general": "out_sharding precision preferred_element_type ragged_dot_dimension_numbers",
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), "axes out_sharding"),
    "reduce_precision": "exponent_bits mantissa_bits",
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min"),
        "base_dilation padding window_dilation window_dimensions window_strides",
    ),
    "reshape": "dimensions new_sizes sharding",
    "reshard": "concrete_mesh dst_sharding",
    "rev": "dimensions",
    **dict.fromkeys(
        ("scatter", "scatter-add"),
        "dimension_numbers indices_are_sorted mode unique_indices update_consts update_jaxpr",
    ),
    "sharding_constraint": "context_mesh layout sharding unconstrained_dims",
    "slice": "limit_indices start_indices strides",
    "sort": "dimension is_stable num_keys",
    "split": "axis sizes",
    "squeeze": "dimensions",
    **dict.fromkeys(("stack", "unstack"), "axis"),
    "tile": "reps",
    "transpose": "permutation",
    **dict.fromkeys(("exp", "log", "log1p", "logistic", "rsqrt", "sqrt", "tanh"), "accuracy"),
}
# Known, and not read.
_UNREAD = {"all_gather": "axis_index_groups", "mul": "out_dtype", "pvary": "axis_index_groups"}
_UNREAD |= {"ragged_dot_general": "group_offset"}


def known_params(name: str) -> set[str]:
    """The parameters of a primitive that jaxquant knows."""
    return {*_READ.get(name, "").split(), *_UNREAD.get(name, "").split()}


def unread_param(eqn: JaxprEqn) -> str | None:
    """A parameter of an equation that no table reads, if one is not at its default."""
    read = _READ.get(eqn.primitive.name, "").split()
    is_default = lambda v: v is None or (isinstance(v, int | tuple) and not v)
    return next((name for name, v in eqn.params.items() if name not in read and not is_default(v)), None)


def order_read(eqn: JaxprEqn) -> tuple[int, ...]:
    """The axes of the operand of a reshape in the order in which its elements are read."""
    return tuple(param(eqn, "dimensions") or range(avals(eqn.invars)[0].ndim))


def avals(variables: Sequence[Any]) -> list[Any]:
    """The abstract values of variables: shapes and dtypes."""
    return [v.aval for v in variables]


def read_equations(
    jaxpr: Jaxpr,
    results: Sequence[Any] | None = None,
    taken: Callable[[JaxprEqn], Sequence[Any]] = lambda eqn: eqn.invars,
) -> list[JaxprEqn]:
    """The equations that some values of a program, or its results, need; `taken` says what each takes."""
    wanted = jaxpr.outvars if results is None else results
    needed, kept = {v for v in wanted if not isinstance(v, Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars) or (results is None and eqn.effects):
            kept.append(eqn)
            needed.update(v for v in taken(eqn) if not isinstance(v, Literal))
    return kept[::-1]


def evaluated(eqn: JaxprEqn, ins: Sequence[Any], around: Jaxpr) -> list[Any]:
    """The results of one equation as it stands; `around` is a program to take its debug information from."""
    values = {v: value for v, value in zip(eqn.invars, ins, strict=True) if not isinstance(v, Literal)}
    alone = around.replace(
        constvars=[], invars=list(values), outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects
    )
    return jax.core.eval_jaxpr(alone, (), *values.values())


def scan_parts(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """The constants, the carry and what is sliced, told by their ranks: a slice has one axis less."""
    ((body, _),) = programs(eqn)
    whole = lambda outside, inside: sum(v.ndim == w.ndim for v, w in zip(outside, inside, strict=True))
    carry = whole(avals(eqn.outvars), avals(body.outvars))
    end = whole(avals(eqn.invars), avals(body.invars))
    return values[: end - carry], values[end - carry : end], values[end:]


def while_parts(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """The constants of the condition, those of the body, and the carry, which is what a loop returns."""
    condition, _ = while_programs(eqn)
    start = len(programs(eqn)[condition][0].invars) - len(eqn.outvars)
    end = len(eqn.invars) - len(eqn.outvars)
    return values[:start], values[start:end], values[end:]


def unchanged(body: Jaxpr, before: int, n: int) -> list[bool]:
    """The values of a loop's carry, of the `n` that come after others, that it passes on as they are."""
    return [body.outvars[k] is body.invars[before + k] for k in range(n)]


def while_programs(eqn: JaxprEqn) -> tuple[int, int]:
    """The indices of the programs that are the condition and the body of a loop."""
    condition, body = (programs(eqn).index(opened(param(eqn, name))) for name in ("cond_jaxpr", "body_jaxpr"))
    return condition, body
