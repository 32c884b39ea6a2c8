# SPDX-License-Identifier: Apache-2.0
"""For the site: the doctests of a docstring, which stand at its end, become its section of examples."""

import griffe


class Examples(griffe.Extension):
    def on_instance(self, *, obj, **kwargs):
        if obj.docstring and "\n>>>" in obj.docstring.value:
            text, examples = obj.docstring.value.split("\n>>>", 1)
            lines = f">>>{examples}".splitlines()
            obj.docstring.value = "\n".join([text, "", "Examples:", *(f"    {line}" for line in lines)])
