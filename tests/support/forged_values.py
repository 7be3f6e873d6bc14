"""What hypothesis draws for files that may have been damaged or forged: nests of values, some of which mean something.

Invariant: everything drawn can be written as JSON, NaN and infinities included.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def examples(thorough: int) -> settings:
    """So many in `make test-full`, a fifth of them in `make test`."""
    return settings(EXAMPLES, max_examples=thorough if os.environ.get("RELAY_FULL_SWEEP") == "1" else thorough // 5)


scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
names = st.sampled_from(
    ["!tensor", "!dict", "!tuple", "!array", "!float", "!bytes", "!counter", "shape", "a", "0.weight"]
)
values = st.recursive(
    scalars | st.sampled_from(["F32", "U8", "float32", "AAAA", "nan", 0, 1, 2**40]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
