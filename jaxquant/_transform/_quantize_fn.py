# SPDX-License-Identifier: Apache-2.0
"""A function with the dots and convolutions that the rules choose quantized."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.ad_checkpoint
import jax.core
from jax import Array

from .._arrays._qparams import QParams
from .._arrays._tally import Tally
from .._base import _checks as checks
from .._base._checks import PyTree
from .._contract._dot import LOWERINGS
from .._contract._lowering import checked_execution
from .._history import DelayedQParams
from .._params import checked_lsq_gradient, refuse_lost_scales, with_lsq_gradient
from .._paths import is_qarray, named_in_errors, with_leaves, with_paths
from .._runtime._kernels import Kernels
from .._runtime._runtimes import RUNTIMES
from .._spec._rule import Rules, checked_rules, pattern_in_words
from . import _errors as errors
from ._caches import CacheRules
from ._call import OWN_ARGUMENTS, Call, Static, call_of, may_take, with_own
from ._choose import is_stochastic
from ._decide import Decisions
from ._entries import Entries, Entry
from ._evaluate import evaluated
from ._freezing import Compared, freeze_leaf, refuse_changed, refuse_lost_ranges
from ._fused import with_room_for_biases
from ._initial import qparams_of_input, qparams_of_parameter
from ._layout import Layout
from ._mask import Mask
from ._misuse import misuse
from ._observers import (
    HISTOGRAMS,
    RANGES,
    TALLIES,
    Observation,
    Observer,
    check_weights,
    grams,
    has_range,
    uses_of_weights,
)
from ._observing import Observing
from ._plan import Plan, Site
from ._quantizing import Quantizing
from ._source import Program, Source, value_of
from ._viewing import Viewing


class _How(NamedTuple):
    """The kind of a call; static."""

    observer: Observer | None = None  # of inputs
    is_float: bool = False
    lsq_gradient: bool = False


class QuantizedFunction:
    """A quantized function, as `quantize_fn` returns it: call it as the function, with the same arguments.

    `q(params, *args, qparams=, lsq_gradient=, key=)` computes the function with the chosen dots and convolutions
    quantized. Its methods also take the arguments of the function: `q.plan` gives the table of its sites, `q.observe`
    the ranges of inputs in one batch, `q.init_qparams` the qparams to train or to serve with, `q.freeze` the parameters
    in integers, and `q.at_sites` the function with a function of yours at each site. All can be transformed by jit,
    grad, vmap, checkpoint, scan, shard_map and jax.export. The original function is `q.__wrapped__`.
    """

    def __init__(
        self, f: Callable, rules: Rules, params_argnum: int, execution: str, strict: bool, kernels: Kernels | None
    ):
        functools.update_wrapper(self, f, ("__module__", "__name__", "__qualname__"), ())
        self._f, self._rules, self._argnum = f, checked_rules(rules), params_argnum
        self._execution, self._strict, self._kernels = execution, strict, kernels
        self._caches = CacheRules.of(f, self._rules)
        try:
            self.__signature__ = with_own(inspect.signature(f))
            self._names = frozenset(inspect.signature(f).parameters)
        except (TypeError, ValueError):
            self._names = frozenset()
        self._compared = Compared()
        # Jitted, because without it a call outside of jit would compile every loop in f again.
        self._jitted = jax.jit(self._evaluated, static_argnums=(0, 1))

    @property
    def runtime(self) -> str | None:
        """The runtime whose bits the function has."""
        return None if self._kernels is None else self._kernels.name

    def __repr__(self):
        name = getattr(self._f, "__qualname__", None) or type(self._f).__name__
        patterns = ", ".join(repr(pattern_in_words(rule.pattern)) for rule in self._rules)
        return (
            f"<quantize_fn of {name} with rules for {patterns or 'nothing'}; params_argnum={self._argnum}, "
            f"execution={self._execution!r}, strict={self._strict}>"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        value, _ = self._result(_How(), args, kwargs)
        return value

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The sites of the function for these arguments; raises what a call would raise.

        Args:
          *args, **kwargs: as in a call, `qparams` too; `jax.ShapeDtypeStruct`s suffice for arrays. The function is
            traced once for the plan and the call.

        Returns:
          Plan: print it, iterate over its `Site`s, or take one by its name.
        """
        return dataclasses.replace(self._planned(args, kwargs).plan, execution=self._execution)

    def observe(
        self,
        *args: Any,
        qparams: Mapping[str, Any] | None = None,
        with_value: bool = False,
        histogram: bool = False,
        gram: bool = False,
        entries: Collection[str] | None = None,
        mask: PyTree = None,
        **kwargs: Any,
    ) -> PyTree:
        """The ranges, or the second moments, of the inputs of the quantized ops in one batch, of the function in float.

        Args:
          *args, **kwargs: the arguments of the function; for parameters that are integers, their real values are used.
          qparams: as in a call; with them the ranges are of the quantized function.
          with_value: static bool. True returns (value, ranges), with the value of the function, quantized if qparams
            are given. Differentiate the value with the ranges beside it (`has_aux`) for moving averages in a training
            step.
          histogram: static bool. True counts the values, for `range_from_histogram`.
          gram: static bool. True gives the moments of what each weight contracts, K^2 + K numbers for each.
          entries: static, paths of the weights to give the second moments for; None is all. Only with `gram`.
          mask: bool array, traced or not, True for the rows that count, such as tokens that are no padding: of the
            shape of the leading axes of each input of an op, such as (batch, tokens) for (batch, tokens, features). Or
            a pytree of such, of which each input takes the one that fits; or {entry: array} for inputs whose rows lie
            otherwise, of which those without an entry count whole. None counts all.

        Returns:
          A dict from entry to Range, or to Histogram, of each input except those that are always dynamic, as inputs
          per token are. Combine batches by `merge` or `ema_ranges`. An input in a scan over
          parameters has one range for each turn; in other loops, one for all turns; in a branch that is not taken, or a
          loop without a turn, the empty range, Range(inf, -inf). Under shard_map, and for sharded arrays, it is one
          range for all devices.

          With `gram=True` a dict from the path of each weight to a Gram of its inputs, whether these are quantized or
          stay in float; of all uses of the weight together. Combine batches by `merge`. Turns, branches and
          devices are as for ranges; where nothing is seen, a Gram is 0. A mask that is nowhere True gives the empty
          range, a histogram without counts, a Gram of 0.

        Gradient: none for ranges; the value has the gradient of the function, or of the call.

        Raises:
          TypeError, ValueError: as a call; with `gram=True`, for a weight that is a part of a parameter; for a mask
            that is not of bools or fits no input, and for one where the function has a `mask` of its own.

        Source: as `jaxquant.observe`; of Grams Hassibi et al., 1993, "Optimal Brain Surgeon".
        """
        with_value = checks.static_bool("with_value", with_value)
        histogram, gram = checks.static_bool("histogram", histogram), checks.static_bool("gram", gram)
        if histogram and gram:
            raise ValueError("`histogram` and `gram` are of two calls, got True for both. Observe the batch twice.")
        if entries is not None and not gram:
            raise ValueError(f"`entries` is for the second moments of weights, got {entries!r}. Pass gram=True.")
        if entries is not None:
            check_weights(entries, self._planned(args, {**kwargs, **self._passed(qparams)}))
        wanted = None if entries is None else frozenset(entries)
        observer = HISTOGRAMS if histogram else grams(wanted) if gram else RANGES
        value, observed = self._collect(observer, qparams is None, qparams, args, kwargs, mask)
        return (value, observed) if with_value else observed

    def _collect(
        self,
        observer: Observer,
        is_float: bool,
        qparams: Mapping[str, Any] | None,
        args: tuple,
        kwargs: dict[str, Any],
        mask: PyTree = None,
    ) -> tuple[Any, dict[str, Any]]:
        """The value of the function, in float or quantized, and what an observer sees of each input."""
        if mask is not None and may_take(self._f, "mask"):
            raise ValueError(
                "`mask` says which rows are observed, and the function has, or may have, an argument of that name. "
                "Quantize a function without, quantize_fn(lambda params, x: f(params, x), rules), or with another "
                "name, quantize_fn(lambda params, x, f_mask: f(params, x, mask=f_mask), rules)."
            )
        return self._result(_How(observer, is_float), args, {**kwargs, **self._passed(qparams)}, Mask.made(mask))

    def tallies(
        self, *args: Any, qparams: Mapping[str, Any] | None = None, mask: PyTree = None, **kwargs: Any
    ) -> tuple[Mapping[str, Entry], dict[str, Tally]]:
        """For `jaxquant.report`: the entries, and what quantizing does to each input of the function in float."""
        if self._argnum:
            raise ValueError(
                f"`q` must have its params as the first argument, got params_argnum={self._argnum}. Quantize a "
                "function that takes them first: lambda params, x: f(x, params)."
            )
        entries = self._planned(args, {**kwargs, **self._passed(qparams)}).entries
        return entries.of, self._collect(TALLIES, True, qparams, args, kwargs, mask)[1]

    def weights(
        self, params: PyTree, wanted: Collection[str], args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[Entries, dict[str, Layout]]:
        """For `jaxquant.solve`: the entries of the function of `params` and `args`, and the layouts of some weights."""
        decisions = self._planned((*args[: self._argnum], params, *args[self._argnum :]), dict(kwargs))
        check_weights(wanted, decisions)
        uses = uses_of_weights(decisions, wanted)
        return decisions.entries, {key: use.layout for key, use in uses.items() if use.layout}

    def program(self, params: PyTree, args: tuple, kwargs: Mapping[str, Any]) -> Program:
        """For `jaxquant.solve`: the function of `params` and `args` as a program, with what is decided about it."""
        args = *args[: self._argnum], params, *args[self._argnum :]
        _, qparams, _ = self._own(kwargs := dict(kwargs))
        with self._explained(args, kwargs):
            return self._program(*call_of(args, kwargs, self._argnum, self._caches), set(qparams or ()))

    def keywords_of_function(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """For `jaxquant.report`: the keywords of a call without those that the function itself does not have."""
        return {name: v for name, v in kwargs.items() if name in self._names or name not in OWN_ARGUMENTS}

    def init_qparams(
        self, *args: Any, ranges: Mapping[str, Any] | None = None, method: str = "minmax", **kwargs: Any
    ) -> dict[str, Any]:
        """The qparams of each entry of the plan, to be trained beside the parameters, or kept.

        Args:
          *args, **kwargs: the arguments of the function. With `ranges`, shapes suffice for all but the parameters.
          ranges: dict {entry: Range or None} of the inputs, from `observe`, merged over batches; an entry whose value
            is None is dynamic. None for the whole dict observes these arguments as one batch; {} makes every input
            dynamic.
          method: static, how parameters are fitted, as in `fit_qparams`.

        Returns:
          A dict from entry to QParams or None: a pytree to differentiate with respect to, update, checkpoint and
          `save`. The key of a parameter is its path; the key of an input is the name of the first site that uses it.
          Where a rule says `history`, also from "name:gradient" to GradientHistory, empty, for the gradient with
          respect to each operand; then `split_histories` comes first.
          The qparams know their spec, and raise under another one. None means dynamic: an input per token always is,
          and you may set others to None. A parameter that was frozen without qparams has None too.

        Gradient: none, as `fit_qparams`.

        Raises:
          TypeError, ValueError: as a call and as `fit_qparams`; for ranges that lack an entry, have an unknown one, or
            one of a parameter or of an input that is always dynamic; and for an input that no batch has reached.

        Source: as `fit_qparams` and `qparams_from_range`.
        """
        decisions = self._planned(args, kwargs)
        entries = decisions.entries
        dynamic = ranges is not None and not ranges
        known = self.observe(*args, **kwargs) if ranges is None else ranges
        without = {key for key, entry in entries.of.items() if dynamic or not has_range(entry)}
        entries.same_keys("ranges", "q.observe(params, ...)", known, without)
        params = dict(with_paths(args[self._argnum]))
        found = {}
        for key, entry in entries.of.items():
            with named_in_errors(key, rule=entry.rule):
                if entry.is_weight and known.get(key) is not None:
                    raise ValueError(
                        "`ranges` are of inputs, got one of the parameter, which is fitted to its values by `method`. "
                        f"Drop it; or set the qparams that this gives, qparams[{key!r}] = qparams_from_range(...)."
                    )
                made = (
                    qparams_of_parameter(params[key], entry, method) if entry.is_weight
                    else qparams_of_input(known.get(key), entry)
                )  # fmt: skip
                found[key] = made and made._replace(spec=entry.spec)
        found = with_room_for_biases(found, decisions.fused, params)
        return found | {key: gradient.empty() for key, gradient in entries.gradients.items()}

    def freeze(self, *args: Any, qparams: Mapping[str, Any] | None = None, **kwargs: Any) -> PyTree:
        """The parameters, with QArrays for those that the rules quantize: what is served.

        `q(frozen, *args, qparams=qparams)` equals `q(params, *args, qparams=qparams)` bit for bit, and its calls
        quantize no parameter.

        Args:
          *args, **kwargs: the arguments of the function; shapes suffice for all but the parameters.
          qparams: as in a call; None fits the parameters by min-max, as a call without them does.

        Returns:
          The pytree of the parameters, as `quantize_params` gives it with the specs of the plan on their paths, laid
          out in memory for serving (`QArray.order`, `QArray.stored`). Leaves that no rule quantizes, and QArrays, are
          the same objects.

        Gradient: none; integers have none.

        Raises:
          TypeError, ValueError: as a call; and for a parameter that is also read in float, without Rule(...,
            everywhere=True). Outside of jit, where values are known, also for a parameter with NaN or infinities,
            which integers cannot hold, and for qparams with a scale that training has made 0, negative or NaN.

        Source: as `quantize`.
        """
        key, _, _ = self._own({**kwargs})
        entries = self._planned(args, {**kwargs, **self._passed(qparams)}).entries
        params, known = args[self._argnum], qparams or {}
        refuse_lost_scales(known)
        new = [freeze_leaf(path, leaf, entries, known, key) for path, leaf in with_paths(params)]
        return with_leaves(params, new)

    def at_sites(
        self,
        site: Callable[[Site, Array], Any],
        op: Callable[..., Array] | None = None,
        value: Callable[..., Array] | None = None,
    ) -> Callable:
        """The function with another function at each site, instead of the quantizer: for reports and exporters.

        Args:
          site: (info, x) -> array of the shape and dtype of x, the operand. `info` is the Site of the plan, with the
            `qparams` of that operand, or None if it is dynamic. It is called once for each site with a spec whenever
            the function is traced, and may have side effects.
          op: (info, lhs, rhs) -> array, called in place of each dot or convolution that has a site. `info` is the op,
            with its `name`, `params` and `result`, the shape and dtype to return; `info(lhs, rhs)` computes it. `lhs`
            and `rhs` are what `site` returned, which may then be anything, such as integers with their qparams; an
            operand without a spec is passed as it is. A ragged dot also passes the sizes of its groups. None computes
            the op, in float.
          value: (info, *operands) -> array, called in place of each value that a `runtime` computes in integers. `info`
            is a Value with the site, the kind of its kernel, the op and the limits of an activation. Operands are the
            input and the weight of a layer in the order of the contraction, the weight as `site` returned it, then its
            bias; or what a sum, a mean or a pool takes; or the value itself. None computes it, in float.

        Returns:
          A function with the arguments of a call, without `key` and `lsq_gradient`.

        Gradient: through the function, `site` and `op`.

        Raises:
          TypeError: for a `site` or `op` that is not a function.
          ValueError: as a call, and for a result of `site` or `op` with another shape or dtype.

        >>> import jax.numpy as jnp
        >>> from jaxquant import Rule, activation_spec, fake_quant, quantize_fn, weight_spec
        >>> q = quantize_fn(lambda params, x: x @ params["w"], [Rule("w", weight_spec(8), activation_spec(8))])
        >>> view = q.at_sites(lambda info, x: (print(info.name, x.shape), fake_quant(x, info.spec, info.qparams))[1])
        >>> _ = view({"w": jnp.ones((4, 2))}, jnp.ones((3, 4)))
        w:input (3, 4)
        w (4, 2)
        """
        if not callable(site):
            raise TypeError(f"`site` must be a function (info, x) -> array, got {checks.kind(site)}.")
        if not (op is None or callable(op)):
            raise TypeError(f"`op` must be a function (info, lhs, rhs) -> array or None, got {checks.kind(op)}.")
        if not (value is None or callable(value)):
            raise TypeError(f"`value` must be a function (info, *operands) -> array, got {checks.kind(value)}.")

        def view(*args: Any, **kwargs: Any) -> PyTree:
            qparams = None if "qparams" in self._names else kwargs.pop("qparams", None)
            call, arrays = call_of(args, kwargs, self._argnum, self._caches)
            with self._explained(args, kwargs):
                refuse_lost_ranges(arrays, args[self._argnum], qparams)
                program, static = self._checked(call, _How(), arrays, qparams)
                evaluator, nothing = Viewing(program.decisions, site, op, value), Observation.of(program.decisions)
                outs, _ = evaluated(evaluator, program, arrays, static, nothing, None)
            return value_of(program.leaves(outs), Static.of(program.structure))

        return view

    def _result(
        self, how: _How, args: tuple, kwargs: dict[str, Any], mask: Mask | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The value of a call, and what it observes."""
        key, qparams, lsq_gradient = self._own(kwargs)
        call, arrays = call_of(args, kwargs, self._argnum, self._caches)
        if any(isinstance(v, jax.ShapeDtypeStruct) for v in arrays):
            raise TypeError("An argument is a ShapeDtypeStruct, expected arrays. Shapes are for q.plan(...).")
        how = how._replace(lsq_gradient=lsq_gradient)
        with self._explained(args, kwargs):
            if not how.is_float:
                refuse_lost_ranges(arrays, args[self._argnum], qparams)
                entries = lambda: self._decided(call, how, arrays, key, qparams).entries
                self._compared.check(arrays, args[self._argnum], qparams, entries)
            leaves, structure, decisions, observed = self._jitted(call, how, arrays, key, qparams, mask)
            if not how.is_float:
                errors.refuse_dynamic(decisions.value.plan, self._kernels)
        return value_of(leaves, structure), observed

    def _planned(self, args: tuple, kwargs: dict[str, Any]) -> Decisions:
        key, qparams, lsq_gradient = self._own(kwargs)
        if key is None and self._rounds_stochastically():
            key = jax.eval_shape(lambda: jax.random.key(0))  # a plan needs none
        call, arrays = call_of(args, kwargs, self._argnum, self._caches)
        with self._explained(args, kwargs):
            return self._decided(call, _How(lsq_gradient=lsq_gradient), arrays, key, qparams)

    def _decided(
        self, call: Call, how: _How, arrays: Sequence[Any], key: Array | None, qparams: Mapping[str, Any] | None
    ) -> Decisions:
        # Out of the cache of jit, so that the function is traced once for this and the call. A cache of our own would
        # have to know the whole key of jit's, such as whether 64 bits are enabled and which mesh is set, or be stale.
        _, _, decided, _ = self._jitted.eval_shape(call, how, arrays, key, qparams, None)
        return decided.value

    @contextlib.contextmanager
    def _explained(self, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[None]:
        """An error inside also says what is wrong with the arguments, where they show it."""
        try:
            yield
        except Exception as error:
            if said := misuse(args, kwargs, self._argnum, self._caches):
                raise ValueError(f"{said} What failed: {error}") from error
            raise

    def _rounds_stochastically(self) -> bool:
        specs = (spec for rule in self._rules for spec in (rule.weight, rule.activation, *rule.gradients))
        return any(map(is_stochastic, specs))

    def _own(self, kwargs: dict[str, Any]) -> tuple[Any, Any, bool]:
        """The arguments that the function does not have, taken out of its keywords: (key, qparams, lsq_gradient)."""
        own = lambda name, default: default if name in self._names else kwargs.pop(name, default)
        qparams, lsq_gradient, key = itertools.starmap(own, OWN_ARGUMENTS.items())
        key = checks.rounding_key(key, self._rounds_stochastically(), "no rule that rounds so")
        return key, qparams, checked_lsq_gradient(lsq_gradient, qparams, "q.init_qparams(params, ...)")

    def _passed(self, qparams: Mapping[str, Any] | None) -> dict[str, Any]:
        """The qparams of a method as an argument of the call."""
        if qparams is not None and "qparams" in self._names:
            raise ValueError(
                "`qparams` is an argument of the function itself, so that the quantized one can take none. Rename it: "
                "quantize_fn(lambda params, x, f_qparams: f(params, x, qparams=f_qparams), rules)."
            )
        return {} if qparams is None else {"qparams": qparams}

    def _program(self, call: Call, arrays: Sequence[Any], static: Set[str]) -> Program:
        source = Source(self._f, self._rules, self._argnum, self._caches, self._strict, self._kernels)
        return source.program(call, arrays, static)

    def _evaluated(
        self,
        call: Call,
        how: _How,
        arrays: Sequence[Any],
        key: Array | None,
        qparams: Mapping[str, Any] | None,
        mask: Mask | None,
    ) -> tuple[list[Any], Static, Static, dict[str, Any]]:
        """The results, without what is static of them; their structure; the plan; and what is observed."""
        program, static = self._checked(call, how, arrays, qparams)
        decisions, caches = program.decisions, {cache.path: cache for cache in program.caches if cache}
        observation = Observation.of(decisions, how.observer, mask and mask.checked(decisions.entries.of))
        evaluator = (
            Observing(observation) if how.is_float
            else Quantizing(decisions, observation, self._execution, key, caches)
        )  # fmt: skip
        outs, observed = evaluated(evaluator, program, arrays, static, observation, key)
        return program.leaves(outs), Static.of(program.structure), Static.known_by_identity(decisions), observed

    def _checked(
        self, call: Call, how: _How, arrays: Sequence[Any], qparams: Mapping[str, Any] | None
    ) -> tuple[Program, dict[str, QParams | DelayedQParams | None]]:
        """The program of a call, and the qparams of its entries, None where they are dynamic; raises for wrong ones."""
        known = qparams if isinstance(qparams, Mapping) else {}
        args, kwargs = call.arguments(arrays)
        refuse_changed(args[self._argnum])
        program = self._program(call, arrays, {name for name, v in known.items() if v is not None})
        plan, entries = program.decisions.plan, program.decisions.entries
        frozen = {path: v for path, v in zip(program.paths, arrays, strict=True) if path is not None and is_qarray(v)}
        specs = [site.spec for site in plan] + [v for of in program.decisions.of.values() for v in of.gradient]
        if "key" in self._names and any(map(is_stochastic, specs)):
            raise ValueError(
                "`key` is an argument of the function itself, and rules round stochastically, which needs a key of "
                "its own. Rename the argument: quantize_fn(lambda params, x, f_key: f(params, x, key=f_key), rules)."
            )
        for name, of in (*enumerate(args), *kwargs.items()):
            if name != self._argnum and entries.are_of_qparams(of):
                raise ValueError(
                    f"Argument {name!r} holds the qparams of this function. Pass them by name: q(params, ..., "
                    "qparams=qparams)."
                )
        of_entries, delayed = entries.checked_qparams(qparams, frozen)
        operands = {path for of in program.walk.found() for v in of.operands for path in v.origin.weights}
        entries.check_frozen(frozen, qparams, operands)
        if how.lsq_gradient:
            for name, used in of_entries.items():
                if used is not None and name not in frozen:
                    of_entries[name] = with_lsq_gradient(used, entries.of[name].size, entries.of[name].spec, None)
        return program, {**of_entries, **delayed}


def quantize_fn(
    f: Callable,
    rules: Rules,
    *,
    params_argnum: int = 0,
    execution: str = "auto",
    strict: bool = False,
    runtime: str | None = None,
) -> QuantizedFunction:
    """Quantizes the dots and convolutions of any function that JAX can trace, without a change to it.

    The function is traced, and the parameters are followed to the dots and convolutions that use them. Then the program
    is evaluated with the ops quantized that the rules choose. If both operands are quantized, the value is the exact
    contraction in integers, scaled once, as in `dot_general`. If only one is, the original op gets its `fake_quant`.
    Without qparams, ranges are dynamic: min-max of the values in each call.

    Args:
      f: pure function of arrays and anything else, as for `jax.jit`: it is traced once for each kind of arguments.
        Apply a model of flax, nnx, equinox or haiku in it as always.
      rules: static, as in `match_rules`, or with any field of `Rule`; the first rule that matches an op decides about
        it. A pair (pattern, spec) quantizes the weight alone; Rule(pattern, weight=, activation=) quantizes both
        operands. A spec may leave its axis None: PerChannel(None) then means the output channels of the op, and blocks
        run along the contracted axis. PerToken() is for activations. Axes of a parameter are counted on the parameter.
      params_argnum: static int, the positional argument of f that holds the parameters.
      execution: static, as in `dot_general`; does not affect the result, but for "native": float8 products of the
        device, in dot products also MX and NVFP4, forward and, where a rule has such a `gradient`, backward; and of
        weights in groups that meet floats, the sums that a TPU or GPU is fastest at.
      strict: static bool. True makes sites that no rule matches an error; with a `runtime` also values that it would
        compute in float between its integers.
      runtime: static, "onnxruntime", "litert" (XNNPACK) or "litert_reference" (reference kernels, microcontrollers), to
        compute what that runtime computes, bit for bit. What layers, sums, means, pools and concatenations take and
        give gets a name, and a grid by the activation of the layer's rule, unless a rule of kind "value" has another.
        Where a layer is followed by its bias, relu or relu6, its value is that of one kernel: an int32 bias added to
        the sum of products, one multiplication, one rounding. Rules must be of 8-bit inputs with one static scale, and
        of symmetric weights; other ops stay in float, and the plan names them. None adds and rounds in float.

    Returns:
      QuantizedFunction: a function with the arguments of f and `key=`, a PRNG key for stochastic rounding alone (if f
        has its own argument `key`, `key=` is that one). It can be transformed as f can, by jit, grad, vmap, checkpoint,
        scan, shard_map and jax.export. `.plan(*args)` is the table of its sites.

    Gradient: the gradient of the op at the quantized values, passed straight through the quantizer of each operand;
    none through ranges. Reverse mode only: `jax.jvp` raises.

    Raises:
      TypeError: for rules of another kind.
      ValueError: when it is called or its plan is made: for a rule that matches no site, unless it is optional; for a
        spec that does not fit the operand; for a site inside a function with a custom derivative, if no rule says what
        becomes of the derivative; for a parameter that a rule chooses and that goes where nothing can be replaced
        (pallas_call, FFI), or into a backward pass that f itself contains.

    Source: Jacob et al., 2018, for the integer contraction; the gradient as `fake_quant`. Of runtimes their kernels:
      ONNX Runtime 1.32 on x86, LiteRT 2.3.

    >>> import jax.numpy as jnp
    >>> from jaxquant import Rule, activation_spec, quantize_fn, weight_spec
    >>> f = lambda params, x: jnp.tanh(x @ params["w1"]) @ params["w2"]
    >>> params, x = {"w1": jnp.ones((4, 8)), "w2": jnp.ones((8, 2))}, jnp.ones((3, 4))
    >>> q = quantize_fn(f, [Rule("**", weight_spec(8), activation_spec(8))])
    >>> q(params, x).shape
    (3, 2)
    >>> [site.name for site in q.plan(params, x)]
    ['w1:input', 'w1', 'w2:input', 'w2']
    """
    if not callable(f):
        raise TypeError(f"`f` must be a function, got {checks.kind(f)}. Pass one such as lambda params, x: ....")
    if not inspect.isroutine(f) and callable(getattr(f, "apply", None)) and callable(getattr(f, "init", None)):
        raise TypeError(
            f"`f` must be a function of the parameters, got the model {checks.kind(f)}. Pass its apply: "
            "quantize_fn(model.apply, rules), called as model.apply is."
        )
    params_argnum = checks.static_int_between("params_argnum", params_argnum, 0, 255)
    execution = checked_execution(execution, LOWERINGS)
    kernels = None if runtime is None else RUNTIMES[checks.one_of("runtime", runtime, tuple(RUNTIMES))]
    return QuantizedFunction(f, rules, params_argnum, execution, checks.static_bool("strict", strict), kernels)
