"""Matrix products: operands packed into panels by generated kernels, then multiplied from registers.

Packing reads an operand wherever and however it lies (transposed, permuted, half precision, the end of an
element-wise chain), so that no operand is ever copied for its layout alone. The product kernel then reads panels of
`rows` rows and `columns` columns front to back. On CPUs a work-item keeps a tile in vector registers; elsewhere a
work-group shares tiles in local memory. Sums run over the inner dimension in order, so results are repeatable.

Source of the scheme: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 34(3), 2008.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backends.opencl.emit import Buffer, Launch, Scope, Writer, held, rounded, stored
from backends.opencl.indices import Index, linear, variable
from backends.opencl.loops import Traits
from backends.opencl.values import Place, Stored, Value


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a tile of the result."""

    rows: int
    columns: int


def tile_of(traits: Traits, rows: int, columns: int) -> Tile:
    """The tile for a result of that size on that device."""
    if traits.lanes > 1:
        return Tile(64, 64)
    vectors = 2 if columns > traits.wide else 1
    most = {16: 12, 8: 6, 4: 4}[traits.wide] if vectors == 2 else 8
    parts = -(-rows // most)
    return Tile(-(-rows // parts), vectors * traits.wide)


def pack(value: Value, target: Buffer, along: int, panel: int, traits: Traits) -> Launch:
    """(batch, m, k), or with `along` 2 (batch, k, n), into panels [batch][panel][k][panel places], zeros at the end."""
    batch, depth = value.shape[0], value.shape[3 - along]
    extent = value.shape[along]
    panels = -(-extent // panel)
    writer = Writer()
    scope = Scope(writer)
    b, q, k, j = (writer.loop(size, name) for size, name in ((batch, "b"), (panels, "q"), (depth, "k"), (panel, "j")))
    writer.ranges.loops.clear()
    across = linear([(q, panel), (j, 1)])
    place: Place = (variable(b), across, variable(k)) if along == 1 else (variable(b), variable(k), across)
    name = value.at(scope, place)
    pointer = writer.pointer(target, writes=True)
    destination = f"((({b}*{panels}+{q})*(INDEX){depth}+{k})*{panel}+{j})"
    store = stored(pointer, destination, name, target.dtype)
    pad = stored(pointer, destination, "0", target.dtype)
    unit = isinstance(value, Stored) and value.strides[3 - along] == 1 and value.strides[along] != 1
    step = 16 if depth > 256 else depth
    lines = [
        "const INDEX item = get_global_id(0);",
        f"const INDEX {q} = item % {panels};",
        f"const INDEX {b} = item / {panels};",
        f"const int valid = min({panel}, (int)({extent} - {q} * {panel}));",
    ]
    inner = f"for (int {j} = 0; {j} < {{}}; {j}++) {{{{"
    body = [*scope.lines, store]

    def over(valid: str) -> list[str]:
        if unit:  # short runs along k, one place after another: both sides stay in the cache
            return [
                f"for (INDEX k0 = 0; k0 < {depth}; k0 += {step}) {{",
                inner.format(valid),
                f"for (INDEX {k} = k0; {k} < min((INDEX){depth}, k0 + (INDEX){step}); {k}++) {{",
                *body,
                "}}}",
            ]
        return [f"for (INDEX {k} = 0; {k} < {depth}; {k}++) {{", inner.format(valid), *body, "}}"]

    if extent % panel == 0:
        lines += over(str(panel))
    else:
        rest = f"for (INDEX {k} = 0; {k} < {depth}; {k}++) for (int {j} = valid; {j} < {panel}; {j}++) {{ {pad} }}"
        lines += [f"if (valid == {panel}) {{", *over(str(panel)), "} else {", *over("valid"), rest, "}"]
    group = (1,) if traits.lanes == 1 else ()
    return writer.launch("\n".join(lines) + "\n", (panels * batch,), group, "pack")


@dataclass(frozen=True)
class Sizes:
    """batch, rows, columns and depth of a product."""

    batch: int
    rows: int
    columns: int
    depth: int


def product(
    left: Buffer,
    right: Buffer,
    target: Stored,
    sizes: Sizes,
    tile: Tile,
    bias: Value | None,
    output: int | None,
    traits: Traits,
) -> Launch:
    """The product of packed operands, plus a bias, into row-major memory."""
    writer = Writer()
    a, b = writer.pointer(left), writer.pointer(right)
    if traits.lanes > 1:
        return _shared_product(writer, a, b, target, sizes, tile, bias, output)
    real = left.dtype
    kind = held(real)
    width = traits.wide if kind == "float" else traits.wide // 2
    vectors = tile.columns // width
    panels, tiles = -(-sizes.columns // tile.columns), -(-sizes.rows // tile.rows)
    # Enough work-items for all units; each runs over its row panels with one column panel in the cache.
    parts = max(1, min(tiles, -(-8 * traits.units // (panels * sizes.batch))))
    chunk = -(-tiles // parts)
    parts = -(-tiles // chunk)
    lines = [
        "const INDEX column = get_global_id(0);",
        "const INDEX part = get_global_id(1);",
        "const INDEX batch = get_global_id(2);",
        f"for (INDEX tile = part * {chunk}; tile < {tiles} && tile < (part + 1) * {chunk}; tile++) {{",
        f"__global const {kind}* ap = {a} + (batch * {tiles} + tile) * (INDEX){sizes.depth * tile.rows};",
        f"__global const {kind}* bp = {b} + (batch * {panels} + column) * (INDEX){sizes.depth * tile.columns};",
    ]
    lines += [f"{kind}{width} c{i}_{v} = 0;" for i in range(tile.rows) for v in range(vectors)]
    lines.append(f"for (int k = 0; k < {sizes.depth}; k++) {{")
    lines += [f"const {kind}{width} b{v} = vload{width}({v}, bp);" for v in range(vectors)]
    lines += [
        f"c{i}_{v} = fma(({kind}{width})(ap[{i}]), b{v}, c{i}_{v});" for i in range(tile.rows) for v in range(vectors)
    ]
    lines += [f"ap += {tile.rows}; bp += {tile.columns};", "}"]
    # The tile goes to memory by way of an array: one text for whole tiles and for those at the edges.
    lines.append(f"{kind} out[{tile.rows * tile.columns}];")
    lines += [f"vstore{width}(c{i}_{v}, {i * vectors + v}, out);" for i in range(tile.rows) for v in range(vectors)]
    writer.ranges.extents |= {"batch": sizes.batch, "tile": tiles, "column": panels, "i": tile.rows, "j": tile.columns}
    row, place = linear([("tile", tile.rows), ("i", 1)]), linear([("column", tile.columns), ("j", 1)])
    end = _ending(writer, f"out[i * {tile.columns} + j]", variable("batch"), row, place, target, bias, output)
    rows = _least(tile.rows, sizes.rows, "tile")
    columns = _least(tile.columns, sizes.columns, "column")
    lines += [f"const int rows = {rows};", f"const int columns = {columns};"]
    store = ["for (int j = 0; j < {}; j++) {{", *[line.replace("{", "{{").replace("}", "}}") for line in end], "}}"]
    text = "\n".join(store)
    lines.append("for (int i = 0; i < rows; i++) {")
    if sizes.columns % tile.columns:
        lines += [f"if (columns == {tile.columns}) {{", text.format(tile.columns), "} else {"]
        lines += [text.format("columns"), "}"]
    else:
        lines.append(text.format(tile.columns))
    lines += ["}", "}"]
    return writer.launch("\n".join(lines) + "\n", (panels, parts, sizes.batch), (1, 1, 1), "product")


def _least(size: int, extent: int, name: str) -> str:
    return str(size) if extent % size == 0 else f"min({size}, (int)({extent} - {name} * {size}))"


def _ending(
    writer: Writer,
    total: str,
    batch: Index,
    row: Index,
    column: Index,
    target: Stored,
    bias: Value | None,
    output: int | None,
) -> list[str]:
    """C that takes a sum to its place in memory."""
    scope = Scope(writer)
    dtype = target.dtype
    place = (batch, row, column)
    value = scope.value(held(dtype), total)
    if bias is not None:
        value = scope.value(held(dtype), f"({value} + {bias.at(scope, place)})")
    value = scope.value(held(dtype), rounded(value, dtype))
    scope.store(target.buffer, target.address(place), value, output)
    return scope.lines


def _shared_product(
    writer: Writer, a: str, b: str, target: Stored, sizes: Sizes, tile: Tile, bias: Value | None, output: int | None
) -> Launch:
    """For GPUs: 16 x 16 work-items share a tile of 64 x 64, 16 deep, and keep 4 x 4 sums each."""
    kind = held(torch.float64 if target.dtype is torch.float64 else torch.float32)
    panels, tiles = -(-sizes.columns // 64), -(-sizes.rows // 64)
    lines = [
        f"__local {kind} left[16][64];",
        f"__local {kind} right[16][64];",
        "const int x = get_local_id(0), y = get_local_id(1), one = y * 16 + x;",
        "const INDEX column = get_group_id(0), tile = get_group_id(1), batch = get_group_id(2);",
        f"__global const {kind}* ap = {a} + (batch * {tiles} + tile) * (INDEX){sizes.depth * 64};",
        f"__global const {kind}* bp = {b} + (batch * {panels} + column) * (INDEX){sizes.depth * 64};",
        f"{kind} sums[4][4];",
        "for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) sums[i][j] = 0;",
        f"for (int k0 = 0; k0 < {sizes.depth}; k0 += 16) {{",
        "for (int step = 0; step < 4; step++) {",
        "const int at = step * 256 + one, k = at / 64, c = at % 64;",
        f"left[k][c] = k0 + k < {sizes.depth} ? ap[(k0 + k) * 64 + c] : 0;",
        f"right[k][c] = k0 + k < {sizes.depth} ? bp[(k0 + k) * 64 + c] : 0;",
        "}",
        "barrier(CLK_LOCAL_MEM_FENCE);",
        "for (int k = 0; k < 16; k++) {",
        f"{kind} u[4], v[4];",
        "for (int i = 0; i < 4; i++) { u[i] = left[k][y + 16 * i]; v[i] = right[k][x + 16 * i]; }",
        "for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) sums[i][j] = fma(u[i], v[j], sums[i][j]);",
        "}",
        "barrier(CLK_LOCAL_MEM_FENCE);",
        "}",
        "for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) {",
        "const INDEX m = tile * 64 + y + 16 * i, n = column * 64 + x + 16 * j;",
        f"if (m < {sizes.rows} && n < {sizes.columns}) {{",
    ]
    writer.ranges.extents |= {"batch": sizes.batch, "m": sizes.rows, "n": sizes.columns}
    lines += _ending(writer, "sums[i][j]", variable("batch"), variable("m"), variable("n"), target, bias, output)
    lines.append("}}")
    return writer.launch("\n".join(lines) + "\n", (panels * 16, tiles * 16, sizes.batch), (16, 16, 1), "product")
