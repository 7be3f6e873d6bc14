"""The torch dtypes behind the names of options: what a precision computes in, and what a state dtype stores.

It decides nothing. Invariant: a name that `relay.options` allows has its dtype here.
"""

from __future__ import annotations

import torch

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What each precision computes in."""

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
"""What each state dtype is stored in."""
