"""Loads the weights of a Hugging Face folder into a model, one tensor (or one set of merged tensors) at a time.

The model may have been built without memory (`relay.models.empty_weights`): its parameters get memory as they are read,
and a trainer moves them into its store one layer after the other, so that at no time the host holds the model twice.
Names and shapes are compared before any data is read. Invariant: no file is unpickled, no parameter is left without a
value, and what folder and model do not have in common is refused by name unless it was allowed.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from hal.page_lock import give_back_free_memory
from relay.checkpoint.shards import DTYPES
from relay.errors import RelayError
from relay.models.safetensors_file import check_whole
from relay.models.weight_conversion import Conversion, is_transformers_model, plan_loading

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

TRIM_EVERY = 64 << 20
"""After so many bytes have been read, freed memory is returned to the system."""


class UnmatchedKeys(NamedTuple):
    """Names of the model that the folder did not have, and names of the folder that the model does not have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(
    model: nn.Module,
    folder: str | Path,
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> UnmatchedKeys:
    """Load a model's tensors from the safetensors files of a folder. Returns the names that were allowed not to match.

    Folders of transformers models may name and cut their tensors differently from the module (experts one by one, a
    base model's folder for a model with a head): the installed transformers knows how.

    Args:
        model: with parameters in memory, which are overwritten, or on the meta device, which get memory. The dtype is
            the model's.
        folder: one that `save_pretrained` wrote, or that was downloaded whole.
        allow_missing: patterns such as `"score.*"` of tensors that the folder may lack, or have in another shape. Those
            that have no memory yet are initialized as the model's class does.
        allow_unexpected: patterns of tensors of the folder that are left out.

    Raises RelayError, before anything is loaded, with the names of what is missing, unexpected or of another shape.
    """
    files = weight_files(Path(folder))
    with ExitStack() as opened:
        shards = _Shards(files, opened)
        targets: dict[str, torch.Tensor] = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }
        plan = plan_loading(model, shards.tensors)
        unmatched = _compare(model, Path(folder), targets, plan, allow_missing, allow_unexpected)
        destination = _Destination(model, targets)
        read = 0
        for conversion in plan:
            fitting = {name for name, result in conversion.results.items() if _fits(name, result, targets)}
            if not fitting:
                continue
            given = {name: shards.read(name) for name in conversion.sources}
            mapped = {tensor.untyped_storage().data_ptr() for tensor in given.values()}
            read += sum(tensor.nbytes for tensor in given.values())
            for name, tensor in conversion.convert(given).items():
                if name in fitting:
                    destination.put(name, tensor, mapped)
            if read >= TRIM_EVERY:
                give_back_free_memory()
                read = 0
        destination.initialize()
    return unmatched


def weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """The files with weights in a folder, and which of their tensors count (None for all).

    Raises RelayError for a folder without weights, or which lacks files that its index names.
    """
    index = folder / INDEX
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        where: Any = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            raise RelayError(f"{index} has no weight_map from names to files. Download the folder again.")
        files: dict[Path, list[str] | None] = {}
        for name, file in where.items():
            if Path(file).name != file:
                raise RelayError(f"{index} names the file {file!r}, which is not in its folder.")
            names = files.setdefault(folder / file, [])
            assert names is not None
            names.append(name)
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise RelayError(
                f"The folder {folder} lacks {len(absent)} of the {len(files)} files in {INDEX}: "
                f"{', '.join(absent[:5])}. Download them."
            )
        return files
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    others = [file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith(".")]
    if not others:
        raise RelayError(f"The folder {folder} holds no .safetensors files. Use a folder that save_pretrained wrote.")
    return dict.fromkeys(others)


def stored_names(folder: Path) -> set[str]:
    """The names of the tensors in a folder. Raises RelayError as `weight_files` does."""
    from safetensors import safe_open

    found: set[str] = set()
    for file, names in weight_files(folder).items():
        if names is None:
            with safe_open(file, framework="pt") as stored:
                names = list(stored.keys())
        found.update(names)
    return found


class _Shards:
    """The tensors of some files: their shapes at once, their data when it is asked for."""

    def __init__(self, files: Mapping[Path, list[str] | None], opened: ExitStack) -> None:
        from safetensors import safe_open

        self.tensors: dict[str, torch.Tensor] = {}
        self._opened = opened
        self._file_of: dict[str, Path] = {}
        self._left: dict[Path, int] = {}
        self._reading: dict[Path, tuple[ExitStack, Any]] = {}
        for file, names in files.items():
            check_whole(file)
            with safe_open(file, framework="pt") as stored:
                held = list(stored.keys())
                for name in held if names is None else names:
                    if name not in held:
                        raise RelayError(f"{file.name} lacks {name}, which {INDEX} says it has. Download it again.")
                    if name in self._file_of:
                        raise RelayError(f"{name} is in {self._file_of[name].name} and in {file.name}. Remove one.")
                    part = stored.get_slice(name)
                    dtype = DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise RelayError(f"{file.name} holds {name} in {part.get_dtype()}, which is not supported.")
                    self.tensors[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
                    self._file_of[name] = file
            self._left[file] = sum(one == file for one in self._file_of.values())

    def read(self, name: str) -> torch.Tensor:
        """A tensor, in the memory of the mapped file. A file is closed when each of its tensors was read once."""
        from safetensors import safe_open

        file = self._file_of[name]
        if file not in self._reading:
            stack = self._opened.enter_context(ExitStack())
            self._reading[file] = stack, stack.enter_context(safe_open(file, framework="pt"))
        stack, stored = self._reading[file]
        tensor: torch.Tensor = stored.get_tensor(name)
        self._left[file] -= 1
        if not self._left[file]:
            del self._reading[file]
            stack.close()
        return tensor


def _compare(
    model: nn.Module,
    folder: Path,
    targets: Mapping[str, torch.Tensor],
    plan: Sequence[Conversion],
    allow_missing: Sequence[str],
    allow_unexpected: Sequence[str],
) -> UnmatchedKeys:
    """What folder and model do not have in common. Raises RelayError if it is more than what is allowed."""
    found: dict[str, tuple[str, ...]] = {}
    unexpected: list[str] = []
    shapes: dict[str, str] = {}
    for conversion in plan:
        for name, tensor in conversion.results.items():
            if name not in targets:
                unexpected += [source for source in conversion.sources if source not in unexpected]
            elif not _fits(name, tensor, targets):
                ours, theirs = tuple(targets[name].shape), tuple(tensor.shape)
                if not _matches(name, allow_missing):
                    shapes[name] = f"{name} of shape {theirs}, where the model has {ours}"
            elif name in found:
                raise RelayError(
                    f"The folder {folder} has {name} twice: as {', '.join(found[name])} and as "
                    f"{', '.join(conversion.sources)}. Remove one of them."
                )
            else:
                found[name] = conversion.sources
    have = {id(targets[name]) for name in found}  # a tied tensor is there under any of its names
    missing = [name for name, tensor in targets.items() if id(tensor) not in have]
    computed = [name for name, buffer in model.named_buffers() if buffer.is_meta and id(buffer) not in have]
    if computed:
        raise RelayError(
            f"The buffers {', '.join(computed[:5])}{_more(computed)} of {type(model).__name__} have no memory, and the "
            "folder lacks them. Build the model under relay.models.empty_weights(), which leaves buffers their values."
        )
    missing, unexpected = _without_ignored(model, missing, unexpected)
    wrong = []
    if shapes:
        wrong.append(f"It holds {'; '.join(list(shapes.values())[:5])}{_more(shapes)}.")
    if lacking := [name for name in missing if not _matches(name, allow_missing) and name not in shapes]:
        wrong.append(
            f"It lacks {len(lacking)} of the model's tensors: {', '.join(lacking[:5])}{_more(lacking)}. For a new head "
            f"give allow_missing={_patterns(lacking)}, which initializes them."
        )
    if extra := [name for name in unexpected if not _matches(name, allow_unexpected)]:
        wrong.append(
            f"It holds {len(extra)} tensors that the model has no use for: {', '.join(extra[:5])}{_more(extra)}. "
            f"allow_unexpected={_patterns(extra)} leaves them out."
        )
    if wrong:
        raise RelayError(
            f"The folder {folder} does not fit {type(model).__name__}. {' '.join(wrong)} "
            "Otherwise build the model from the config.json of the folder."
        )
    return UnmatchedKeys(missing, unexpected)


def _fits(name: str, tensor: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> bool:
    return name in targets and tensor.shape == targets[name].shape


def _without_ignored(model: nn.Module, missing: list[str], unexpected: list[str]) -> tuple[list[str], list[str]]:
    """Without the names that the model's class declares as unimportant (buffers that older versions saved)."""
    adjust = getattr(model, "_adjust_missing_and_unexpected_keys", None)
    if adjust is None or not is_transformers_model(model):
        return missing, unexpected
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    adjust(info)
    return (
        [name for name in missing if name in info.missing_keys],
        [name for name in unexpected if name in info.unexpected_keys],
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _patterns(names: Sequence[str]) -> list[str]:
    """Patterns that a user might give for these names: of their modules, as few as there are."""
    return list(dict.fromkeys(f"{name.rpartition('.')[0]}.*" if "." in name else name for name in names))[:5]


def _more(names: Collection[str]) -> str:
    return f" and {len(names) - 5} more" if len(names) > 5 else ""


class _Destination:
    """Where tensors go: into memory that the model has, or into memory that its parameters get."""

    def __init__(self, model: nn.Module, targets: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._targets = dict(targets)
        self._filled: dict[int, torch.Tensor] = {}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    self._owners.setdefault(id(tensor), []).append((module, key))

    def put(self, name: str, tensor: torch.Tensor, mapped: Collection[int]) -> None:
        """Store a tensor as the model's of that name. `mapped` are the storages that are memory of a file.

        Raises RelayError if the tensor is tied to one that was stored with other values.
        """
        target = self._targets[name]
        if id(target) in self._filled:
            if not torch.equal(self._filled[id(target)], tensor.to(target.dtype)):
                raise RelayError(
                    f"{name} is tied to another weight of the model, and the folder has other values for it. "
                    "Set tie_word_embeddings=False in the configuration, or remove one of the two from the folder."
                )
        elif target.is_meta:
            storage = tensor.untyped_storage()  # a part of a larger one would keep that in memory
            alone = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in mapped
            self._fill(target, tensor.to(target.dtype, copy=not alone, memory_format=torch.contiguous_format))
        else:
            with torch.no_grad():
                target.copy_(tensor)
            self._filled[id(target)] = target

    def _fill(self, target: torch.Tensor, tensor: torch.Tensor) -> nn.Parameter | torch.Tensor:
        filled: torch.Tensor = tensor
        if isinstance(target, nn.Parameter):
            filled = nn.Parameter(tensor, requires_grad=target.requires_grad)
        for module, key in self._owners[id(target)]:
            (module._parameters if isinstance(target, nn.Parameter) else module._buffers)[key] = filled  # type: ignore[assignment]
        self._filled[id(target)] = filled
        return filled

    def initialize(self) -> None:
        """Give parameters that still have no memory the values that a new model's have."""
        fresh: dict[str, torch.Tensor] = {}
        for name, target in self._targets.items():
            if target.is_meta and id(target) not in self._filled:
                fresh[name] = self._fill(target, torch.empty(target.shape, dtype=target.dtype))
                with torch.no_grad():  # so that what is not initialized is noticed
                    fresh[name].fill_(float("nan") if target.is_floating_point() or target.is_complex() else 0)
        if not fresh:
            return
        owners = [module for name in fresh for module, _ in self._owners[id(self._targets[name])]]
        new = set(map(id, fresh.values()))
        if is_transformers_model(self._model):
            self._by_transformers(owners, new)
        else:
            for module in dict.fromkeys(owners):
                reset = getattr(module, "reset_parameters", None)
                if reset is not None and new.issuperset(map(id, module.parameters(recurse=False))):
                    reset()
        left = [name for name, tensor in fresh.items() if not tensor.is_floating_point() or bool(tensor.isnan().any())]
        if left:
            raise RelayError(
                f"{type(self._model).__name__} does not say how {', '.join(left[:5])}{_more(left)} are initialized. "
                "Build their module outside empty_weights(), so that it has values, and load the others again."
            )

    def _by_transformers(self, owners: Sequence[nn.Module], new: Collection[int]) -> None:
        """The library's own initialization, of some modules alone.

        It leaves parameters alone that are marked as initialized, and modules that are.
        """
        above = {id(module) for module in owners}
        for module in self._model.modules():
            if any(id(inner) in above for inner in module.modules()):
                above.add(id(module))
        for tensor in [*self._model.parameters(), *self._model.buffers()]:
            tensor._is_hf_initialized = id(tensor) not in new  # type: ignore[attr-defined]
        for module in self._model.modules():
            module._is_hf_initialized = id(module) not in above  # type: ignore[assignment]
        self._model.initialize_weights()  # type: ignore[operator]
