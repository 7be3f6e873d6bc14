"""From a program to a Python function over torch tensors: what PyTorch's own devices execute.

The graph is run as it was traced, op by op, undecomposed. Four things are changed, none of which changes a bit of any
result:

  * an output is stored the moment it exists (written, or added to what is there), so that its memory is free for
    the next op instead of being occupied to the end (page faults were 5 to 10 % of a step);
  * where the op that makes an output can write to given memory (`mm.out`), it does: no copy;
  * copies that a functional graph does not need (`clone` of a contiguous value, `detach`) are dropped.

  * a matrix product that is added to an output adds inside the product (`backends.torch_device.adding_products`).

Otherwise it is not a compiler: it fuses nothing and reorders nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from backends.torch_device.adding_products import RESHAPES, add_inside, erase_chain
from backends.torch_device.random import ON_DEVICE
from hal.program import Program, Role

aten = torch.ops.aten

_IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}


CPU = torch.device("cpu")


def lower(program: Program, accumulate: tuple[bool, ...], device: torch.device = CPU) -> Callable[..., Any]:
    """A function of (inputs..., [key], outputs...) that stores the program's outputs in the given tensors.

    The tensors are on `device`; so is what the program makes by itself, not on the device that it was traced for.
    """
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        environment[node] = graph.node_copy(node, environment.__getitem__)
    _drop_copies(graph)

    output = next(iter(reversed(graph.nodes)))
    values: list[fx.Node] = list(output.args[0])
    # A segment that is given nothing, and makes constants alone, has none.
    last_placeholder = next(reversed(graph.find_nodes(op="placeholder")), None)
    first = next(iter(graph.nodes))
    written: set[fx.Node] = set()
    replaced: list[fx.Node] = []
    for position, (value, port) in enumerate(zip(values, program.outputs, strict=True)):
        with graph.inserting_before(first) if last_placeholder is None else graph.inserting_after(last_placeholder):
            target = last_placeholder = graph.placeholder(f"output_{position}")
        late = port.role is Role.BUFFER_UPDATE or value.op == "placeholder"
        if accumulate and accumulate[position] and port.role is Role.VALUE_GRADIENT and value.op != "placeholder":
            _add_use_by_use(graph, value, target)
        elif accumulate and accumulate[position] and not late and add_inside(graph, value, target, device):
            replaced.append(value)
        elif accumulate and accumulate[position]:
            with graph.inserting_before(output) if late else graph.inserting_after(value):
                graph.call_function(aten.add_.Tensor, (target, value))
        elif late or not _write_through(graph, value, target, written):
            with graph.inserting_before(output) if late else graph.inserting_after(value):
                graph.call_function(aten.copy_.default, (target, value))
    output.args = ((),)
    for value in replaced:
        erase_chain(graph, value)
    graph.lint()
    move_to_device(graph, device)
    root = torch.nn.Module()
    for name, constant in program.constants.items():
        root.register_buffer(name, constant.to(device))
    return fx.GraphModule(root, graph).forward


def _add_use_by_use(graph: fx.Graph, value: fx.Node, target: fx.Node) -> None:
    """Add a value's gradient to what other segments made of it, one use after the other, as autograd does.

    Where the segment uses the value several times its gradient is a sum already; (there + a) + b rounds otherwise
    than there + (a + b), and autograd knows no segments.
    """
    if value.meta.get("relaid"):  # a permutation at the end: add in the order of the op that made it
        with graph.inserting_after(target):
            target = graph.call_function(aten.permute.default, (target, _inverse(value.args[1])))
        value = value.args[0]  # type: ignore[assignment]
    uses = [value]
    while uses[0].target is aten.add.Tensor and uses[0].meta.get("is_gradient_acc") and len(uses[0].users) == 1:
        uses[:1] = uses[0].args  # type: ignore[assignment]
    position = {node: number for number, node in enumerate(graph.nodes)}
    latest = target  # the last of the placeholders
    for use in uses:
        latest = use if position[use] > position[latest] else latest
        with graph.inserting_after(latest):
            added = graph.call_function(aten.add_.Tensor, (target, use))
        position[added] = position[latest]  # it is inserted right behind
        latest = added


def _inverse(order: Any) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def move_to_device(graph: fx.Graph, device: torch.device) -> None:
    """Name the device in ops that make tensors; masks are drawn there, what cannot be is drawn on the host and sent."""
    for node in list(graph.nodes):
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
        if node.target in ON_DEVICE and device.type != "cpu":
            node.target, node.kwargs = ON_DEVICE[node.target], {**node.kwargs, "device": device}
        elif getattr(node.target, "__module__", "") == "hal.random" and device.type != "cpu":
            with graph.inserting_after(node):
                sent = graph.call_function(aten._to_copy.default, (node,), {"device": device})
            node.replace_all_uses_with(sent, delete_user_cb=lambda user, sent=sent: user is not sent)


def _drop_copies(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        before, after = source.meta.get("val"), node.meta.get("val")
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            continue
        plain_clone = node.target is aten.clone.default and before.stride() == after.stride()
        if (plain_clone and before.is_contiguous()) or node.target in _IDENTITIES:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _write_through(graph: fx.Graph, value: fx.Node, target: fx.Node, written: set[fx.Node]) -> bool:
    """Let the op that makes `value` write to `target` itself. False where it cannot."""
    producer = value
    while producer.target in RESHAPES:
        producer = producer.args[0]  # type: ignore[assignment]
    if producer.op != "call_function" or producer in written:
        return False
    final, made = value.meta["val"], producer.meta.get("val")
    if not isinstance(made, torch.Tensor) or not made.is_contiguous() or not final.is_contiguous():
        return False
    variant = _out_variant(producer.target)
    if variant is None or made.numel() != final.numel() or made.dtype != final.dtype:
        return False
    if made.dim() == 0:
        return False  # some reductions (mse_loss.out) first resize the memory they are given to their input's shape
    with graph.inserting_before(producer):
        destination = target
        if made.shape != final.shape:
            destination = graph.call_function(aten.view.default, (target, list(made.shape)))
    producer.target = variant
    producer.kwargs = {**producer.kwargs, "out": destination}
    written.add(producer)
    return True


def _out_variant(target: Any) -> Any:
    """The overload of an op that writes to `out=` and otherwise takes the same arguments, or None."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    schema = target._schema
    if len(schema.returns) != 1 or any(argument.alias_info is not None for argument in schema.arguments):
        return None
    wanted = [(argument.name, str(argument.type)) for argument in schema.arguments]
    packet = target.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        arguments = candidate._schema.arguments
        outs = [argument for argument in arguments if argument.is_out]
        rest = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if len(outs) == 1 and outs[0].name == "out" and rest == wanted:
            return candidate
    return None
