# SPDX-License-Identifier: Apache-2.0
"""The README's example runs and learns, and its commands stand where .ci/run looks for them."""

import contextlib
import io
import pathlib
import re

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_learns():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    before, after = map(float, printed.getvalue().split())
    assert after < before / 4


def test_the_commands_are_one_line_each():
    for name, last in (("main-job", "notebooks/01_qat_digits.py"), ("tests", "-m pytest")):
        (command,) = re.findall(rf"<!-- {name} -->\n```\n(.*)\n```\n", README)
        assert command.startswith("python3 -m venv .venv && ")
        assert command.endswith(last)


def test_links_exist():
    root = pathlib.Path(__file__).parents[1]
    assert [link for link in re.findall(r"\]\(([^)#:]+)\)", README) if not (root / link).exists()] == []
