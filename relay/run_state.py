"""The state of a run between steps: weights, optimizer, step count, and what may be done with them.

Layers are inserted and removed, checkpoints written and read, weights returned. It runs no steps; the trainer, which
extends it, does. Invariant: a call that raises has changed nothing, or later calls raise `InconsistentState`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import msgspec
import torch
from torch import nn

from hal.errors import DeviceLost
from hal.host import Ledger
from hal.spec.units import parse_size
from relay.build_run import Run
from relay.checkpoint.format import SHARD_BYTES, Checkpoint, Progress
from relay.checkpoint.saving import (
    Saving,
    check_fits,
    group_names,
    restore_optimizer,
    restore_user,
    restore_weights,
    start,
    states_of,
    whole_state,
)
from relay.distributed.together import Together
from relay.eps.joined_state import JoinedState, WholeMaster
from relay.eps.master_weights import to_master_weights
from relay.errors import InconsistentState, RelayError
from relay.models.save_pretrained import save_pretrained
from relay.option_schema import fixed_scale
from relay.partition.edit_layers import edit_blocks, inserted, names_by_tensor, removed, renames, reordered, replaced
from relay.processes import refuse_copy, refuse_in_child
from relay.runtime.grad_mode import as_if_alone

logger = logging.getLogger("relay")

SAVED_OPTIONS = (
    "device", "microbatches", "precision", "stash", "slots", "state_dtype", "clip_grad_norm", "clip_grad_value",
    "layers_per_slot", "recompute", "master_weights", "resident_layers", "loss_over",
    "head_chunk_tokens", "layers_per_visit", "device_speeds",
)  # fmt: skip
"""The options that a checkpoint shows to whoever looks into it; a resumed run may have others."""


class RunState:
    """What a trainer holds from one step to the next.

    Attributes:
        optimizer: a torch.optim.Optimizer whose `param_groups` hold the hyperparameters.
        baseline_device_bytes: the device memory that plain training would need; 0 before the first batch is prepared.
    """

    def __init__(self, run: Run) -> None:
        options = run.options
        self.optimizer = run.optimizer
        self.options = options
        self.baseline_device_bytes = 0
        self._compiler = run.compiler
        self._session = run.session
        self._grouping = run.grouping
        self._scale = run.scale
        self._seed = options.seed
        self._fixed_scale = fixed_scale(options.loss_scale) if options.precision == "fp16" else 1.0
        self._step = 0
        self._saving: Saving | None = None
        self._closed = False
        self._begun = False
        self._last_saved = ""
        self._process = os.getpid()
        self._together = run.together
        self._failed = False

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(
            "A trainer",
            "For its weights use trainer.state_dict(), or copy the model. For the run with its optimizer use "
            "trainer.save(folder), and trainer.load(folder) in a trainer made there.",
        )

    # -- changing the architecture ----------------------------------------------------------------------------

    def insert(self, index: int, layer: nn.Module, within: str | None = None) -> None:
        """Insert a layer before index `index` of the model's layers, with a new optimizer state.

        `within` names the list of layers (such as `"encoder.layer"`) where a whole model has several. All four edits
        (`insert`, `remove`, `replace`, `reorder`) keep weights and optimizer states of the layers that stay, even if
        their names change, and learning-rate schedulers continue. Raises IndexError, ValueError or PartitionError with
        nothing changed.
        """
        self._edit(within, lambda layers: inserted(layers, index, layer))

    def remove(self, index: int, within: str | None = None) -> None:
        """Remove a layer and its optimizer state. The module keeps its weights."""
        self._edit(within, lambda layers: removed(layers, index))

    def replace(self, index: int, layer: nn.Module, within: str | None = None) -> None:
        """Replace a layer by another: `remove`, then `insert`."""
        self._edit(within, lambda layers: replaced(layers, index, layer))

    def reorder(self, order: Sequence[int], within: str | None = None) -> None:
        """Reorder the layers: the i-th is then the one that had index `order[i]`."""
        self._edit(within, lambda layers: reordered(layers, order))

    def _edit(self, within: str | None, change: Callable[[list[nn.Module]], list[nn.Module]]) -> None:
        self._check_usable()
        self._refuse_among_ranks("editing the model's layers", "Edit the model before the trainer is built.")
        self.synchronize()
        before = names_by_tensor(self._model)
        modules = self._compiler.modules
        undo = edit_blocks(self._model, within, change) if modules is None else self._compiler.use(change(modules))
        try:
            groups, group_of = self._grouping(self._model)
        except ValueError:
            undo()
            raise
        split = {id(tensor) for tensor in self._session.store.split_tensors()}
        to_master_weights(self._model, self.options.master_weights, self.options.precision, split)
        names = renames(before, self._model)
        self._session.change_model(self._model, names)
        order = [name for name, _ in self._model.named_parameters()]
        self.optimizer.regroup(groups, group_of)
        self._session.server.rename(names, group_of, order)
        self._compiler.forget()
        self.baseline_device_bytes = 0

    # -- weights and figures ----------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """The model's parameters and buffers under its own names; a list's are those of `nn.Sequential(*list)`.

        What a loss has that is a module of the user's own is under `loss.`. The tensors are the store's, as in PyTorch:
        the next step changes them. With split masters each is made float32 when it is looked up, in memory of its own;
        of several processes that have them all call it, and each gets all of them, made at once.
        """
        own = self._own_state()
        store = self._session.store
        if not store.split:
            return own
        shown = self._shown().named_parameters(remove_duplicate=False)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        if self._together is not None:
            whole = self._together.whole_weights(store)
            joined = {key: whole[names[id(one)]] for key, one in shown if names[id(one)] in whole}
            return JoinedState(own, {key: WholeMaster(tensor) for key, tensor in joined.items()}, self.synchronize)
        split = {key: store.split[names[id(one)]] for key, one in shown if names[id(one)] in store.split}
        return JoinedState(own, split, self.synchronize)

    def _own_state(self, with_loss: bool = True) -> dict[str, torch.Tensor]:
        """The model's own tensors by its own names, as `state_dict` of a module gives them."""
        self.synchronize()
        self._session.store.check(self._model)
        return self._shown(with_loss).state_dict()

    def _shown(self, with_loss: bool = True) -> nn.Module:
        """The model, or a list of modules as one: with its loss, or without it and without class weights."""
        modules, loss = self._compiler.modules, getattr(self._model, "loss", None)
        if modules is None or (with_loss and not type(loss).__module__.startswith("torch.nn.")):
            return self._model
        return nn.Sequential(*modules)

    def sync_to(self, model: nn.Module) -> None:
        """Copy the weights into another model with the same names (or those without `loss.`), in that one's dtypes."""
        state = self.state_dict()
        model.load_state_dict(self._own_state(hasattr(model, "loss")))
        if isinstance(state, JoinedState):
            own = model.state_dict()
            for name in own.keys() & state.masters().keys():
                own[name].copy_(state[name])

    def save_pretrained(self, folder: str | Path, shard_size: str = "5GB") -> None:
        """Save a Hugging Face model as a folder that `from_pretrained` loads, weights as safetensors in shards.

        With split masters it writes float32, as without, one weight after the other, and a log message says so.
        """
        own, state = self._own_state(), self.state_dict()
        masters = state.masters() if isinstance(state, JoinedState) else None
        with self._session.store.as_traced():  # so that the configuration has the dtype of what is written
            save_pretrained(self._model, own, folder, shard_size, masters)
        if masters:
            logger.info("%s has float32 weights: %d of them joined from split masters.", folder, len(masters))

    def synchronize(self) -> None:
        """Wait for the updates of the last step that still run. Raises their error.

        Only with `defer_updates=True` does `step` return before its updates have ended. Call this before you read or
        write the model's tensors then; `state_dict`, `save`, `evaluate` and `predict` wait by themselves.
        """
        refuse_in_child(self._process)
        self._session.guard.synchronize()
        if self._session.store.split:  # what was written through the model is the master now
            self._session.store.take_edits()

    def recompile(self) -> None:
        """Forget all that was compiled, so that the next step traces the model's code anew.

        A step notices by itself when something that the code reads has changed: attributes, hooks, functions,
        containers, globals. Call this after a change that it cannot notice, such as one in a file, an environment
        variable or a C extension, or in a tensor of more than a mebibyte that was written to through `.data`. Resident
        layers are sent again too.
        """
        self._compiler.forget()
        self._session.forget_slots()

    # -- checkpoints ------------------------------------------------------------------------------------------

    @as_if_alone()
    def save(
        self,
        path: str | Path,
        *,
        background: bool = False,
        memory: int | str = "1GB",
        shard_bytes: int | str = SHARD_BYTES,
        **user: Any,
    ) -> Saving:
        """Write a checkpoint: a folder at `path`. A checkpoint that is there is replaced.

        Args:
            path: the folder.
            background: return at once, and write while training continues. Errors are then raised by the next `save`,
                or by `wait` of the returned object. Several processes write together.
            memory: the most bytes of copies that a background checkpoint may take, such as "1GB".
            shard_bytes: parameters share files up to this size.
            user: what else belongs to the run, such as `scheduler=` and `data=`: objects with `state_dict()`, or plain
                values.

        Raises CheckpointError, with the earlier checkpoint untouched, and InconsistentState.
        """
        self._check_usable()
        self.wait_saved()
        session = self._session
        if session.store.split:
            self.synchronize()
        progress = Progress(
            step=self._step,
            seed=self._seed,
            loss_scale=self._scale.state() if self._scale is not None else None,
            optimizer=session.server.optimizer.kind,
            groups=group_names(self._model, self.param_groups),
            options={name: getattr(self.options, name) for name in SAVED_OPTIONS},
            user=states_of(user),
        )
        # Before the first step optimizer states may not be allocated yet.
        background = background and session.scheduler is not None
        if self._together is not None:
            self.synchronize()
            self._saving = self._together.save(
                Path(path), self._model, session.server, session.host, progress, parse_size(memory),
                parse_size(shard_bytes), background,
            )  # fmt: skip
            self._last_saved = str(path)
            return self._saving
        self._saving = start(
            Path(path), self._model, session.server, session.host, session.guard.pending, progress, parse_size(memory),
            parse_size(shard_bytes), background,
        )  # fmt: skip
        self._last_saved = str(path)
        return self._saving

    @as_if_alone()
    def load(self, path: str | Path, *, weights_only: bool = False, verify: bool = True, **user: Any) -> int:
        """Load a checkpoint. Returns the number of steps that its run had made.

        Args:
            path: the checkpoint's folder.
            weights_only: load parameters and buffers alone, for a new run.
            verify: first read everything once and compare checksums.
            user: objects that were given to `save`, by the same keywords; their `load_state_dict` is called.

        Raises CheckpointError if the checkpoint is damaged or is of another model or optimizer; nothing has changed
        then.
        """
        refuse_in_child(self._process)
        self._check_open()
        self._session.store.check(self._model)
        try:
            self.wait_saved()
        except Exception as lost:  # the state is replaced in any case
            logger.warning("A checkpoint that was being written is lost: %s", lost)
        session = self._session
        optimizer, together = session.server.optimizer, self._together
        problem: Exception | None = None
        try:
            checkpoint = Checkpoint(Path(path))
            check_fits(checkpoint, self._model, session.store, optimizer, self.param_groups, weights_only, user)
            if verify and (together is None or together.is_first):
                checkpoint.verify()
            else:
                checkpoint.check_layout()
        except Exception as failure:
            problem = failure
        if together is not None:
            together.agree_on_load(problem, "" if problem else checkpoint.manifest.describe())
        if problem is not None:
            raise problem
        session.reset()
        try:
            restore_weights(checkpoint, self._model, session.store)
            manifest = checkpoint.manifest
            if not weights_only:
                part_of = whole_state if together is None else together.part_of
                restore_optimizer(checkpoint, self._model, optimizer, self.param_groups, part_of)
                self._step, self._seed = manifest.step, manifest.seed
                if self._scale is not None and manifest.loss_scale is not None:
                    self._scale.restore(msgspec.structs.asdict(manifest.loss_scale))
        except BaseException as failure:
            session.guard.broken = failure
            raise
        restore_user(checkpoint, user)
        self._last_saved = str(path)
        return self._step

    @property
    def together(self) -> Together | None:
        """The agreements with the other processes that train together; None for one process."""
        return self._together

    def wait_saved(self, quietly: bool = False) -> None:
        """Wait for a checkpoint that is being written. Raises its error, once, unless `quietly`."""
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.wait()
            except Exception:
                if not quietly:
                    raise

    @property
    def _model(self) -> nn.Module:
        return self._compiler.model

    @property
    def steps(self) -> int:
        """How many steps have been made, including skipped ones. It is the number of the next step."""
        return self._step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale; 1 in other precisions."""
        return self._scale.value if self._scale is not None else self._fixed_scale

    @property
    def ledger(self) -> Ledger:
        """The bytes in host memory, by state and dtype."""
        return self._session.host.ledger

    @property
    def device_name(self) -> str:
        """The device's string; of several devices all, joined by commas."""
        return ",".join(lane.device.info.name for lane in self._session.lanes)

    def _check_open(self) -> None:
        if self._closed:
            raise RelayError("This trainer is closed. Its model is usable; to train it further build a new trainer.")

    def _check_usable(self) -> None:
        refuse_in_child(self._process)
        self._check_open()
        self._session.store.check(self._model)
        broken = self._session.guard.broken
        if broken is not None:
            raise InconsistentState(
                f"An earlier step failed while layers were being updated ({broken}), so some layers are updated and "
                f"others are not. {self._what_to_load()}"
            ) from broken

    def _with_what_is_left(self, lost: DeviceLost) -> DeviceLost:
        """The error of a lost device with the device's name, the step, and where to go on."""
        broken = self._session.guard.broken is not None
        left = "Some layers were updated and others were not." if broken else "No parameter was changed."
        then = self._what_to_load() if broken else "Call trainer.reopen() and repeat the step."
        saved = f" The last checkpoint is {self._last_saved!r}." if self._last_saved and not broken else ""
        return DeviceLost(f"Device {self.device_name!r} was lost in step {self.steps + 1}: {lost} {left} {then}{saved}")

    def _refuse_among_ranks(self, call: str, advice: str) -> None:
        """Raise RelayError for a call that several processes cannot make."""
        if self._together is not None:
            raise RelayError(f"{call} is not possible with several processes. {advice}")

    def _what_to_load(self) -> str:
        if self._last_saved:
            return f"Continue with trainer.load({self._last_saved!r}), the last checkpoint that this trainer used."
        return "Load a checkpoint, or build a new trainer; this one has saved no checkpoint."
