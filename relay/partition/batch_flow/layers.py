"""The ops of layers: convolutions, pools, norms, attention, recurrence, dropout."""

from __future__ import annotations

from relay.partition.batch_flow.labels import Kind, rows
from relay.partition.batch_flow.op_call import Labels, OpCall, alike


def windows(call: OpCall) -> Labels:
    """Convolutions, pools and scalings, over the last dimensions."""
    source = call.operands[0]
    label = call.label(source)
    spatial = next((int(one) for one in "123" if f"{one}d" in call.name), source.meta["val"].dim() - 2)
    if label.kind is not Kind.ROWS or any(call.label(other).kind is not Kind.FREE for other in call.operands[1:]):
        return alike(call, call.mixed("takes samples together"))
    weight = call.argument("weight")
    batched = weight is None or source.meta["val"].dim() == weight.meta["val"].dim()
    if label.dim >= source.meta["val"].dim() - spatial or not batched or (weight is not None and label.dim != 0):
        return alike(call, call.mixed("goes over the batch"))
    return call.shaped(label, "takes samples together")


def normalized(call: OpCall) -> Labels:
    """Norms, which go over the last dimensions, or over all but the first."""
    source = call.operands[0]
    label = call.label(source)
    if label.kind is not Kind.ROWS or any(call.label(other).kind is not Kind.FREE for other in call.operands[1:]):
        return alike(call, call.mixed("goes over the batch"))
    over = call.argument("normalized_shape")
    kept = source.meta["val"].dim() - len(over) if over is not None else 1
    if label.dim >= kept:
        return alike(call, call.mixed("goes over the batch"))
    val = call.node.meta["val"]
    if not isinstance(val, (tuple, list)):
        return call.shaped(label)
    first = call.shaped_item(label, 0, "goes over the batch")
    return (first, *(call.unknown() for _ in val[1:]))


def attention(call: OpCall) -> Labels:
    """Scaled dot-product attention: its heads and batch stand before the last two dimensions."""
    found: tuple[int, int] | None = None
    for operand in call.operands:
        label = call.label(operand)
        if label.kind is Kind.FREE:
            continue
        place = (label.dim - operand.meta["val"].dim(), label.unit)
        if label.kind is not Kind.ROWS or place[0] >= -2 or (found is not None and found[0] != place[0]):
            return alike(call, call.mixed("puts every sample together with every other"))
        found = place if found is None or not found[1] else found
    assert found is not None
    val = call.node.meta["val"]
    if not isinstance(val, (tuple, list)):
        return call.shaped(rows(0, found[1]), "puts every sample together with every other")
    return (
        call.shaped_item(rows(0, found[1]), 0, "puts every sample together with every other"),
        *(call.unknown() for _ in val[1:]),
    )


def distances(call: OpCall) -> Labels:
    """cdist: of every row of one tensor to every row of another."""
    operands = [(operand, call.label(operand)) for operand in call.operands]
    taken = [(label.dim - operand.meta["val"].dim(), label) for operand, label in operands if label.kind is Kind.ROWS]
    if len(taken) == 1 and taken[0][0] != -1:
        return call.shaped(taken[0][1])
    if len(taken) == 2 and taken[0][0] == taken[1][0] < -2 and taken[0][1].unit == taken[1][1].unit:
        return call.shaped(taken[0][1])
    return call.mixed("puts every sample together with every other")


def recurrent(call: OpCall) -> Labels | None:
    """nn.RNN, nn.LSTM and nn.GRU over sequences that are not packed."""
    if "batch_first" not in call.arguments:
        return None
    source = call.argument("input")
    label, batch_dim = call.label(source), 0 if call.argument("batch_first") else 1
    if source.meta["val"].dim() != 3 or label.kind is not Kind.ROWS or label.dim != batch_dim:
        return alike(call, call.mixed("goes over the batch"))
    return call.shaped(label, "goes over the batch")


def triangle(call: OpCall) -> Labels:
    source = call.operands[0]
    label = call.label(source)
    if label.kind is not Kind.ROWS or label.dim >= source.meta["val"].dim() - 2:
        return call.mixed("takes a triangle of the batch")
    return call.shaped(label)


def dropped(call: OpCall) -> Labels:
    """Dropout, drawn for each element."""
    return call.shaped(call.label(call.operands[0]))
