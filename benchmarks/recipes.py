# SPDX-License-Identifier: Apache-2.0
"""The tables of the recipes in the docs: by the code of their pages."""

import contextlib
import importlib.util
import io
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

from .runner import Part

jax.config.update("jax_platforms", "cpu")  # whatever else there is


def missing() -> str:
    return "" if importlib.util.find_spec("keras") else "needs `pip install keras`"


DOCS = pathlib.Path(__file__).parents[1] / "docs"


def of_page(rounds: int, name: str) -> Iterator[tuple]:
    """The ROWS of a page's code."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / f"recipe_{name}.md").read_text(), re.S)
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
    yield from names["ROWS"]


PACKAGES = "optax", "keras", "scikit-learn", "gguf"
OF_RL = "trained", "log-probabilities of rollouts and trainer, apart at most", "right digits before", "after 150 steps"
OF_DISTILL = "weights in", "to nearest", "`solve.gptq` of `ranges`", "scales distilled", "weights and scales distilled"
PARTS = {
    "rl": Part(OF_RL, of_page, 1, ("rl",)),
    "keras": Part(("weights of 2 bits, inputs of 4", "test accuracy"), of_page, 1, ("keras",)),
    "ternary": Part(("weights", "test accuracy, not trained", "trained"), of_page, 1, ("ternary",)),
    "distill": Part(OF_DISTILL, of_page, 1, ("distill",)),
    "lora": Part(("bits per character", "in float", "as the file has it"), of_page, 1, ("lora",)),
}
