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

from backends.opencl.codegen.emit import Buffer, Launch, Scope, Writer, c_type, loaded, rounded, stored
from backends.opencl.codegen.indices import Index, linear, variable
from backends.opencl.codegen.loops import Traits
from backends.opencl.codegen.values import Coordinates, Stored, Value


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
    """(batch, m, k), or with `along` 2 (batch, k, n), into panels [batch][panel][k][element], zeros at the end."""
    batch, extent, depth = value.shape[0], value.shape[along], value.shape[3 - along]
    panels = -(-extent // panel)
    writer = Writer()
    scope = Scope(writer)
    extents = {"b": batch, "q": panels, "k": depth, "j": panel}
    b, q, k, j = (writer.counter(size, name) for name, size in extents.items())
    name = _element(value, along, scope, variable(b), linear([(q, panel), (j, 1)]), variable(k))
    pointer = writer.pointer(target, writes=True)
    long, all_panels = writer.number(depth), writer.number(panels)
    destination = f"((({b}*{all_panels}+{q})*{long}+{k})*{panel}+{j})"
    store = stored(pointer, destination, name, target.dtype)
    pad = stored(pointer, destination, "0", target.dtype)
    body = [*scope.lines, store]
    every_k = f"for (INDEX {k} = 0; {k} < {long}; {k}++)"
    whole_panels = extent % panel == 0
    valid = str(panel) if whole_panels else "valid"
    lines = [
        "const INDEX item = get_global_id(0);",
        f"const INDEX {q} = item % {all_panels};",
        f"const INDEX {b} = item / {all_panels};",
    ]
    if not whole_panels:
        lines.append(f"const int valid = min({panel}, (int)({writer.number(extent)} - {q} * {panel}));")
    if _unit(value) == 3 - along:  # short runs along k, one element after another: both sides stay in the cache
        lines += [
            f"const INDEX run = {long} > 256 ? 16 : {long};",
            f"for (INDEX k0 = 0; k0 < {long}; k0 += run) {{",
            f"for (int {j} = 0; {j} < {valid}; {j}++) {{",
            f"for (INDEX {k} = k0; {k} < min({long}, k0 + run); {k}++) {{",
            *body,
            "}}}",
        ]
    elif whole_panels:
        lines += [f"{every_k} for (int {j} = 0; {j} < {panel}; {j}++) {{", *body, "}"]
    else:  # loops of known length are faster
        lines += [f"if (valid == {panel}) {{", f"{every_k} for (int {j} = 0; {j} < {panel}; {j}++) {{", *body, "}"]
        lines += ["} else {", f"{every_k} for (int {j} = 0; {j} < valid; {j}++) {{", *body, "}}"]
    if not whole_panels:
        lines.append(f"{every_k} for (int {j} = valid; {j} < {panel}; {j}++) {{ {pad} }}")
    group = (1,) if traits.lanes == 1 else ()
    return writer.launch("\n".join(lines) + "\n", (panels * batch,), group, "pack")


def _unit(value: Value) -> int | None:
    """The dimension along which an operand in memory is contiguous, of rows and columns."""
    if not isinstance(value, Stored):
        return None
    return 2 if value.strides[2] == 1 else 1 if value.strides[1] == 1 else None


def _element(value: Value, along: int, scope: Scope, batch: Index, across: Index, k: Index) -> str:
    """The name of an operand's element. The address of an operand in memory is an argument of each launch."""
    coordinates: Coordinates = (batch, across, k) if along == 1 else (batch, k, across)
    if not isinstance(value, Stored):
        return value.at(scope, coordinates)
    unit = _unit(value)
    terms = [scope.writer.number(value.offset)]
    for dim, index in enumerate(coordinates):
        terms.append(index.text if dim == unit else f"{index.text}*{scope.writer.number(value.strides[dim])}")
    pointer = scope.writer.pointer(value.buffer)
    return scope.value(c_type(value.dtype), loaded(pointer, "+".join(terms), value.dtype))


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
    """The product of packed operands, plus a bias, into all of a buffer.

    Sizes are arguments: the text is the same for all products with such tiles, which for a compiler are many to unroll.
    """
    writer = Writer()
    a, b = writer.pointer(left), writer.pointer(right)
    depth, all_rows, all_columns = (writer.number(size) for size in (sizes.depth, sizes.rows, sizes.columns))
    if traits.lanes > 1:
        return _shared_product(writer, a, b, target, sizes, (depth, all_rows, all_columns), bias, output)
    real = left.dtype
    kind = c_type(real)
    width = traits.wide if kind == "float" else traits.wide // 2
    vectors = tile.columns // width
    panels, tiles = -(-sizes.columns // tile.columns), -(-sizes.rows // tile.rows)
    # Enough work-items for all units; each runs over its row panels with one column panel in the cache.
    parts = max(1, min(tiles, -(-8 * traits.units // (panels * sizes.batch))))
    chunk = -(-tiles // parts)
    parts = -(-tiles // chunk)
    each, last = writer.number(chunk), writer.number(tiles)
    lines = [
        "const INDEX column = get_global_id(0);",
        "const INDEX part = get_global_id(1);",
        "const INDEX batch = get_global_id(2);",
        f"for (INDEX tile = part * {each}; tile < {last} && tile < (part + 1) * {each}; tile++) {{",
        f"__global const {kind}* ap = {a} + (batch * {last} + tile) * {depth} * {tile.rows};",
        f"__global const {kind}* bp = {b} + (batch * get_global_size(0) + column) * {depth} * {tile.columns};",
    ]
    lines += [f"{kind}{width} c{i}_{v} = 0;" for i in range(tile.rows) for v in range(vectors)]
    lines.append(f"for (INDEX k = 0; k < {depth}; k++) {{")
    lines += [f"const {kind}{width} b{v} = vload{width}({v}, bp);" for v in range(vectors)]
    lines += [
        f"c{i}_{v} = fma(({kind}{width})(ap[{i}]), b{v}, c{i}_{v});" for i in range(tile.rows) for v in range(vectors)
    ]
    lines += [f"ap += {tile.rows}; bp += {tile.columns};", "}"]
    # The tile goes to memory by way of an array: one text for whole tiles and for those at the edges.
    lines.append(f"{kind} out[{tile.rows * tile.columns}];")
    lines += [f"vstore{width}(c{i}_{v}, {i * vectors + v}, out);" for i in range(tile.rows) for v in range(vectors)]
    writer.ranges.extents |= {"batch": sizes.batch, "tile": tiles, "column": panels, "i": tile.rows, "j": tile.columns}
    row, column = linear([("tile", tile.rows), ("i", 1)]), linear([("column", tile.columns), ("j", 1)])
    end = _ending(
        writer, f"out[i * {tile.columns} + j]", (variable("batch"), row, column), "start + j", target, bias, output
    )
    loop = ["for (int j = 0; j < {}; j++) {{", *[line.replace("{", "{{").replace("}", "}}") for line in end], "}}"]
    text = "\n".join(loop)
    lines += [
        f"const int rows = min({tile.rows}, (int)({all_rows} - tile * {tile.rows}));",
        f"const int columns = min({tile.columns}, (int)({all_columns} - column * {tile.columns}));",
        "for (int i = 0; i < rows; i++) {",
        f"const INDEX start = (batch * {all_rows} + {row.text}) * {all_columns} + column * {tile.columns};",
        f"if (columns == {tile.columns}) {{",
        text.format(tile.columns),
        "} else {",
        text.format("columns"),
        "}}}",
    ]
    return writer.launch("\n".join(lines) + "\n", (panels, parts, sizes.batch), (1, 1, 1), "product")


def _ending(
    writer: Writer,
    total: str,
    coordinates: Coordinates,
    where: str,
    target: Stored,
    bias: Value | None,
    output: int | None,
) -> list[str]:
    """C that stores a sum in memory at the address `where`."""
    scope = Scope(writer)
    dtype = target.dtype
    value = scope.value(c_type(dtype), total)
    if bias is not None:
        value = scope.value(c_type(dtype), f"({value} + {bias.at(scope, coordinates)})")
    value = scope.value(c_type(dtype), rounded(value, dtype))
    scope.store(target.buffer, scope.index(where, target.count), value, output)
    return scope.lines


def _shared_product(
    writer: Writer,
    a: str,
    b: str,
    target: Stored,
    sizes: Sizes,
    names: tuple[str, str, str],
    bias: Value | None,
    output: int | None,
) -> Launch:
    """For GPUs: 16 x 16 work-items share a tile of 64 x 64, 16 deep, and keep 4 x 4 sums each."""
    kind = c_type(torch.float64 if target.dtype is torch.float64 else torch.float32)
    panels, tiles = -(-sizes.columns // 64), -(-sizes.rows // 64)
    depth, rows, columns = names
    lines = [
        f"__local {kind} left[16][64];",
        f"__local {kind} right[16][64];",
        "const int x = get_local_id(0), y = get_local_id(1), one = y * 16 + x;",
        "const INDEX column = get_group_id(0), tile = get_group_id(1), batch = get_group_id(2);",
        f"__global const {kind}* ap = {a} + (batch * get_num_groups(1) + tile) * {depth} * 64;",
        f"__global const {kind}* bp = {b} + (batch * get_num_groups(0) + column) * {depth} * 64;",
        f"{kind} sums[4][4];",
        "for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) sums[i][j] = 0;",
        f"for (INDEX k0 = 0; k0 < {depth}; k0 += 16) {{",
        "for (int step = 0; step < 4; step++) {",
        "const int at = step * 256 + one, k = at / 64, c = at % 64;",
        f"left[k][c] = k0 + k < {depth} ? ap[(k0 + k) * 64 + c] : 0;",
        f"right[k][c] = k0 + k < {depth} ? bp[(k0 + k) * 64 + c] : 0;",
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
        f"if (m < {rows} && n < {columns}) {{",
    ]
    writer.ranges.extents |= {"batch": sizes.batch, "m": sizes.rows, "n": sizes.columns}
    coordinates = (variable("batch"), variable("m"), variable("n"))
    where = f"(batch * {rows} + m) * {columns} + n"
    lines += _ending(writer, "sums[i][j]", coordinates, where, target, bias, output)
    lines.append("}}")
    return writer.launch("\n".join(lines) + "\n", (panels * 16, tiles * 16, sizes.batch), (16, 16, 1), "product")
