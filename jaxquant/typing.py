# SPDX-License-Identifier: Apache-2.0
"""The types of what functions and methods return, for annotations and `isinstance`."""

from ._arrays._gram import Gram as Gram
from ._arrays._histogram import Histogram as Histogram
from ._arrays._qparams import Log2QParams as Log2QParams
from ._report import Report as Report
from ._report import ReportRow as ReportRow
from ._transform._plan import Op as Op
from ._transform._plan import Plan as Plan
from ._transform._plan import Site as Site
from ._transform._plan import Value as Value
from ._transform._quantize_fn import QuantizedFunction as QuantizedFunction
