# SPDX-License-Identifier: Apache-2.0
"""What an installed package must do in a bare environment, outside of the repository: train, freeze, save, load."""

import importlib.metadata
import importlib.util
import pathlib
import tempfile

import jax
import jax.numpy as jnp

import jaxquant
from jaxquant import Rule, activation_spec, load, quantize_fn, save, tf, weight_spec

package = pathlib.Path(jaxquant.__file__).parent
assert "site-packages" in package.parts, f"not the installed package: {package}"
assert (package / "py.typed").exists()
assert jaxquant.__version__ == importlib.metadata.version("jaxquant")
extras = [name for name in ("matplotlib", "safetensors", "optax", "pytest") if importlib.util.find_spec(name)]
assert not extras, f"not a bare environment: {extras}"

w1, w2 = jax.random.normal(jax.random.key(0), (4, 32)) / 2, jax.random.normal(jax.random.key(1), (32, 3)) / 6
params = {"w1": w1, "w2": w2}
x = jax.random.normal(jax.random.key(2), (64, 4))
q = quantize_fn(lambda p, x: jax.nn.relu(x @ p["w1"]) @ p["w2"], [Rule("w*", weight_spec(8), activation_spec(8))])
loss = jax.jit(lambda params: (q(params, x) ** 2).mean())
step = jax.jit(lambda params: jax.tree.map(lambda v, g: v - 0.1 * g, params, jax.grad(loss)(params)))
trained = params
for _ in range(20):
    trained = step(trained)
assert loss(trained) < loss(params)

qparams = q.init_qparams(trained, x)
path = pathlib.Path(tempfile.mkdtemp()) / "model.npz"
save(path, {"params": q.freeze(trained, x, qparams=qparams), "qparams": qparams})
served = load(path)
assert served["params"]["w1"].values.dtype == jnp.int8
assert (q(served["params"], x, qparams=served["qparams"]) == q(trained, x, qparams=qparams)).all()
assert tf.fake_quant_with_min_max_args(jnp.float32(0.1), -1.0, 1.0, num_bits=2) == 0
print(f"jaxquant {jaxquant.__version__} works from {package}")
