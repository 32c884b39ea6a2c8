# SPDX-License-Identifier: Apache-2.0
"""The benchmark of an accelerator, without one: what it says then, the bits that it compares with, and its page."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inputs import ones

from benchmarks import accelerator, exactness

QUICK = "quantize"


def test_without_an_accelerator_it_says_so_and_writes_nothing(tmp_path, capsys):
    for arguments in ([], ["products"]):
        accelerator.main(arguments, page=tmp_path / "page.md")
        assert re.fullmatch(r"JAX finds no accelerator here.*\.\n", capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", exactness.FAMILIES)
def test_the_cpu_gives_the_recorded_bits(family, tmp_path, compared):
    exactness.record(tmp_path / "bits.npz", family)
    got, want = exactness.recorded(tmp_path / "bits.npz"), exactness.recorded()
    assert got.inputs.items() <= want.inputs.items()
    exact = {case.name for case in exactness.cases(family) if case.exact}
    for name, value in got.values.items():
        case, _ = name.rsplit(": ", 1)
        if case in exact:
            difference = exactness.difference(value, want.values[name])
            compared("recorded bits", case.split(",")[0], difference.values, difference.differ)
            assert difference.differ == 0, (name, difference)


def test_the_record_is_of_these_cases_and_small():
    names = [case.name for case in exactness.cases()]
    assert len(set(names)) == len(names)
    want = exactness.recorded()
    assert sorted(want.inputs) == sorted(names)
    assert {name.rsplit(": ", 1)[0] for name in want.values} == set(names)
    assert {"jax", "jaxlib"} <= set(want.versions)
    assert exactness.RECORD.stat().st_size < 2e6


def test_a_difference_is_counted_in_values_of_the_dtype():
    one = np.float32([1, 0, -1, np.nan, np.inf])
    assert exactness.difference(one, one) == (5, 0, 0, 0)
    other = np.float32([1 + 2**-22, -0.0, -1, np.nan, np.inf])
    assert exactness.difference(other, one) == (5, 2, 2, 2**-22)
    assert exactness.difference(np.float32([2**-149]), np.float32([-(2**-149)])).ulps == 2
    assert exactness.difference(np.float32([np.nan]), np.float32([1])).ulps == np.inf
    assert exactness.difference(np.int8([-127, 3]), np.int8([127, 3])) == (2, 1, 254, 2)
    half = np.asarray([1, 1.0078125], jnp.bfloat16)  # as .npz returns it
    assert exactness.difference(half[:1], half[1:].view("V2")).ulps == 1
    with pytest.raises(ValueError, match="recorded"):
        exactness.difference(np.float32([1]), np.float16([1]))


def test_other_inputs_are_not_compared():
    case = next(exactness.cases(QUICK))
    want = exactness.recorded()
    with pytest.raises(ValueError, match="make it anew"):
        exactness.compared(case._replace(name="another"), want)


def failing_rows():
    yield "a | b", 1
    raise ValueError("a bar | and\na second line")


def check_tables(lines):
    """Every table has a rule below its first line and lines of one width; how many there are."""
    tables = re.findall(r"(?:^\|.*\n)+", "\n".join(lines) + "\n", re.M)
    for table in tables:
        widths = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(set(widths)) == 1, table
        assert re.fullmatch(r"\|(---\|)+", table.splitlines()[1])
    return len(tables)


def test_the_page_is_whole_and_an_error_stops_its_part_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accelerator.jax, "default_backend", lambda: "gpu")
    parts = {
        "one": accelerator.Part("One", "A text.", ("name", "x", "y"), failing_rows),
        "two": accelerator.Part("Two", "Another.", ("name",), lambda: iter([("last",)])),
    }
    found = accelerator.main([], page=tmp_path / "page.md", parts=parts)
    assert found["rows"] == [{"name": "a | b", "x": 1, "y": ""}, {"name": "last"}]
    page = (tmp_path / "page.md").read_text()
    assert capsys.readouterr().out == page
    assert page.startswith("# Benchmarks on an accelerator\n\n")
    assert "\n\n## One\n\nA text.\n\n| name | x | y |\n|---|---|---|\n" in page
    assert "\n| a \\| b | 1 |  |\n| ValueError: a bar \\| and |  |  |\n\n## Two\n\n" in page
    assert page.endswith("|---|\n| last |\n")
    assert check_tables(page.splitlines()) == 2
    monkeypatch.setattr(accelerator, "LIMIT", -1)
    accelerator.main(["two"], page=tmp_path / "other.md", parts=parts)
    assert "not measured" in capsys.readouterr().out
    assert not (tmp_path / "other.md").exists()


def test_it_warns_if_the_bits_are_of_other_versions(monkeypatch):
    monkeypatch.setattr(exactness, "versions", lambda: exactness.recorded().versions)
    assert "recorded with" not in "".join(accelerator.heading())
    monkeypatch.setattr(exactness, "versions", lambda: {"jax": "0.0.1"})
    assert "this is jax 0.0.1" in "".join(accelerator.heading())


def test_a_run_that_fails_is_a_cell_and_stops_no_other():
    def broken():
        raise RuntimeError("not on this device")

    times = accelerator.Times({"x + 1": lambda: accelerator.calls(lambda x: x + 1, 4, ones(8)), "b": broken}, 4, 3)
    assert times.median("x + 1") > 0
    assert times.cell("b", lambda second: second) == "RuntimeError: not on this device"
    assert times.ratio("b", "x + 1") == times.ratio("x + 1", "b") == ""


def test_calls_are_all_made():
    """The value of the last call: the first number of x is what the loop wrote, and each call read its own number."""
    carry = accelerator.calls(lambda x, v, w: x + v + w, 3, ones((2, 2)), (jnp.float32(10),), (jnp.float32(100),))()
    np.testing.assert_array_equal(carry[1], [[112, 111], [111, 111]])


SMALL = {
    "exactness": lambda: accelerator.exactness_rows(QUICK),
    "elementwise": lambda: accelerator.elementwise_rows((32,), ("bfloat16",), 2),
    "products": lambda: accelerator.product_rows(((1, 8),), 2),
    "steps": lambda: accelerator.step_rows({"MLP": lambda: accelerator.mlp_with((6, 8, 10), 4)}, 2, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", SMALL)
def test_the_parts_run_in_small(part):
    lines = list(accelerator.section(accelerator.PARTS[part]._replace(rows=SMALL[part]), time.monotonic() + 600, []))
    assert check_tables(lines) == 1
    assert len(lines) > 7
    assert "Error" not in "\n".join(lines)
    assert set(accelerator.PARTS) == set(SMALL)


@pytest.mark.slow
def test_every_transformer_can_be_trained():
    apply, params, x = accelerator.transformer_with(1, 16, 2, 4)
    for f in accelerator.contenders(apply).values():
        gradient = jax.eval_shape(jax.grad(lambda params, f=f: f(params, x).sum()), params)
        assert jax.tree.structure(gradient) == jax.tree.structure(params)


@pytest.mark.slow
def test_the_step_is_adam():
    """The first step moves each parameter by the rate against the sign of its gradient."""
    apply, params, x = accelerator.mlp_with((6, 8, 10), 4)
    zeros = jax.tree.map(jnp.zeros_like, params)
    moved, *_ = accelerator.adam_step(apply, 0.01)((params, zeros, zeros, jnp.float32(0)), (x, jnp.arange(4)), ())
    steps = jnp.concatenate([jnp.ravel(a - b) for a, b in zip(*map(jax.tree.leaves, (moved, params)), strict=True)])
    assert jnp.all((jnp.abs(jnp.abs(steps) - 0.01) < 1e-4) | (steps == 0))
