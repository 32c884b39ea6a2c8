# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that takes half of the tests, by a hash of their names: HALF=0 or 1. Pages and models stay whole."""

import os
import zlib

WHOLE = "tests/test_docs.py", "tests/test_notebooks.py", "tests/test_transform_models.py"


def pytest_collection_modifyitems(config, items):
    half = int(os.environ["HALF"])
    is_taken = lambda item: item.nodeid.startswith(WHOLE) or zlib.crc32(item.nodeid.encode()) % 2 == half
    config.hook.pytest_deselected(items=[item for item in items if not is_taken(item)])
    items[:] = [item for item in items if is_taken(item)]
