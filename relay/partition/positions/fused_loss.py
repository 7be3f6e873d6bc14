"""PyTorch's fused linear cross-entropy, written out as the product and the loss that it computes.

`torch.nn.functional.linear_cross_entropy` with options is one op, which runs over chunks of its own. Over Relay's
chunks of positions it is what its documentation names as its reference: `linear`, then `cross_entropy`. Graphs that
run whole keep the op. Invariant: no other op changes.
"""

from __future__ import annotations

import torch
from torch import fx

from relay.partition.positions.labels import HasOwnChunks
from relay.partition.positions.op_calls import NONE, arguments_of, name_of

aten = torch.ops.aten
WHOLE, EACH = "_linear_cross_entropy_batch_chunked", "_linear_cross_entropy_batch_chunked_no_reduction"
REDUCTIONS = {"none": NONE, "mean": 1, "sum": 2}


def write_out_fused(graph: fx.Graph, compute: torch.dtype) -> None:
    """Replace fused linear cross-entropies. Raises HasOwnChunks where the product would not be in their dtype."""
    for node in list(graph.nodes):
        if node.op != "call_function" or name_of(node) not in (WHOLE, EACH):
            continue
        arguments = arguments_of(node)
        rows, weight = arguments["input"].meta["val"], arguments["linear_weight"].meta["val"]
        if compute is not torch.float32 or arguments["acc_dtype"] not in (rows.dtype, weight.dtype):
            raise HasOwnChunks("the model's fused linear cross-entropy computes in a dtype of its own")
        reduction = REDUCTIONS[arguments.get("reduction", "none")]
        size = rows.shape[:1] if reduction == NONE else ()
        with graph.inserting_before(node):
            product = arguments["input"], arguments["linear_weight"], arguments["linear_bias"]
            logits = graph.call_function(aten.linear.default, product)
            logits.meta["val"] = torch.empty((len(rows), len(weight)), dtype=rows.dtype, device="meta")
            targets = arguments["target"], arguments["weight"], reduction, arguments["ignore_index"]
            loss = graph.call_function(aten.cross_entropy_loss.default, (logits, *targets))
            loss.meta["val"] = torch.empty(size, dtype=rows.dtype, device="meta")
        for user in [node] if reduction == NONE else [user for user in node.users if user.args[1] == 0]:
            user.replace_all_uses_with(loss)
