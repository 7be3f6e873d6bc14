"""Steps of a trainer beside the same steps in plain PyTorch, compared tensor by tensor.

In each step four things are compared, in the order in which they are computed: the loss, the gradient of each parameter
as it reaches the optimizer (clipped, without the loss scale), each parameter after the update, and each buffer. What is
equal to rounding only (README, "Exactness") is compared to a tolerance; then each step of plain PyTorch begins from the
relay's weights, so that rounding does not grow from step to step, and the update is compared for equal gradients.

Plain PyTorch is `relay.verification.plain_run`. The trainer's own step is used, and undone afterwards. Invariant: what
cannot be compared is refused by name, or left out of `Verification.compared`; it is never counted as equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from relay.capture import Lowering
from relay.eps.aliases import find_aliases
from relay.eps.optimizer_state import BoundOptimizer
from relay.errors import BatchError, VerificationError
from relay.graph.pytree import TensorTree, tensor_leaves
from relay.metrics import Metrics
from relay.partition.edit_layers import chosen_layers, layer_names
from relay.run_state import RunState
from relay.runtime.compiling.prepared_batch import PreparedBatch
from relay.runtime.stages import CompiledModel
from relay.verification.given_draws import GivenDraws, places_of
from relay.verification.plain_run import PlainPiece, PlainRun, PlainStep, copied_model
from relay.verification.report import Difference, Verification
from relay.verification.run_copy import fits_on_device, refuse_without_room, state_restored, surroundings_restored

ActiveLayers = Sequence[int | str]
"""The layers that take part in a step, as `step` takes them."""

TIED = 1e-5
"""What gradients of tied weights may differ by, relative to the largest of their tensor: another order of additions."""

ROUNDING = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""The same on devices that do not run PyTorch's kernels, by precision."""

SMALL = 1e-3
"""A tensor whose largest gradient is below this share of the step's largest is compared relative to that share: some
gradients (that of a key's bias) are zero but for rounding."""


class WatchedOptimizer:
    """The trainer's optimizer, with each gradient kept as it arrives: without the loss scale, and clipped."""

    def __init__(self, optimizer: BoundOptimizer) -> None:
        self._optimizer = optimizer
        self.gradients: dict[str, torch.Tensor] = {}

    def update(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
    ) -> None:
        """Keep the gradients, then update."""
        for name, gradient in zip(names, gradients, strict=True):
            self.gradients[name] = gradient.clone() if factor is None else gradient * factor
        self._optimizer.update(names, gradients, group, factor)

    def begin(
        self,
        name: str,
        gradient: torch.Tensor,
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
        target: torch.Tensor,
    ) -> bool:
        """Keep the gradient, then begin the update."""
        self.gradients[name] = gradient.clone() if factor is None else gradient * factor
        return self._optimizer.begin(name, gradient, group, factor, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def verify(
    run: RunState,
    make_step: Callable[..., Metrics],
    batches: Iterable[Any],
    steps: int | None,
    learning_rate: Callable[[int], float] | None,
    as_pieces: bool = False,
    weights: Sequence[float] | None = None,
    active_layers: ActiveLayers | Callable[[int], ActiveLayers] | None = None,
) -> Verification:
    """Compare the steps that `make_step` makes with plain PyTorch's; see `relay.Trainer.verify`.

    Raises VerificationError, BatchError or OutOfMemory before the first step, with nothing changed.
    """
    run.wait_saved()
    run.synchronize()
    with surroundings_restored(run, batches):
        given = (_without_gradients(batch) for batch in itertools.islice(iter(batches), steps))
        taken: list[dict[str, Any]] = [
            {"batch": None, "pieces": one, "weights": weights} if as_pieces else {"batch": one} for one in given
        ]
        if not taken:
            raise BatchError("There is no batch to compare: batches is empty, or steps is 0.")
        if active_layers is not None:
            if not run._session.knows_every_layer:  # each layer gets its memory, whichever take part
                run._session.take_over(run._compiler.prepare(**taken[0]).compiled, run.param_groups, training=True)
            for number, one in enumerate(taken, run.steps):
                one["active_layers"] = active_layers(number) if callable(active_layers) else active_layers
        prepared = run._compiler.prepare(**taken[0])
        ready = run._session.prepare(prepared.compiled, run.param_groups, training=True)
        comparison = _Comparison(run, make_step, prepared, ready.loose_ties)
        with state_restored(run):
            return comparison.run(taken, learning_rate)


class _Comparison:
    """The comparison of one trainer."""

    def __init__(
        self, run: RunState, make_step: Callable[..., Metrics], prepared: PreparedBatch, loose_ties: frozenset[str]
    ) -> None:
        self._run = run
        self._make_step = make_step
        compiler, native = run._compiler, run._compiler.lowering is Lowering.NATIVE
        traced_for = compiler.traced_for
        on_device = traced_for.type != "cpu" and native and fits_on_device(run, prepared)
        self._where = traced_for if on_device else torch.device("cpu")
        refuse_without_room(run, prepared, not on_device)
        self._over_batch = prepared.compiled[0].head is not None
        self._exact = native and self._where.type == traced_for.type and not self._over_batch
        self._tied = loose_ties
        loose_tied = bool(self._tied) and run.options.clip_grad_norm is not None
        self._chunked = any(model.stages[-1].segment.chunks is not None for model in prepared.compiled)
        rounds = not self._exact or self._chunked
        self._all_loose = rounds or loose_tied
        self._tolerance = ROUNDING[run.options.precision] if rounds else TIED if self._tied else 0.0
        self._layer_of: dict[str, str] = {}
        for stage in prepared.compiled[0].stages:
            for name in (*stage.parameters, *stage.buffers):
                self._layer_of[name] = stage.segment.name  # of several, the last: its gradient is the first
        self._order = {stage.segment.name: number for number, stage in enumerate(prepared.compiled[0].stages)}
        model, modules, loss = copied_model(run._model, compiler.modules, compiler._loss, compiler.held.views())
        copies = dict(model.named_parameters())
        for name in run._session.store.split:
            copies[name].data = run._session.store.read(name)
        self._plain = self._make_plain(model, modules, loss)
        self._draws = self._make_draws(prepared) if self._draws_numbers(prepared) else None

    def run(self, asked: Sequence[Mapping[str, Any]], learning_rate: Callable[[int], float] | None) -> Verification:
        """Make and compare the steps, up to the first that differs."""
        run, count = self._run, 0
        found: list[Difference] = []
        for one in asked:
            if learning_rate is not None:
                for group in run.param_groups:
                    group["lr"] = learning_rate(run.steps)
                self._plain.set_learning_rate(run.param_groups)
            found = self._one_step(one)
            count += 1
            if found:
                break
        return Verification(
            steps=count,
            equal=not found,
            tolerance=self._tolerance,
            loose=self._loose_in_words(),
            compared=self._compared_in_words(),
            device=run.device_name,
            plain_device=str(self._where),
            first=found[0] if found else None,
            differing=len(found),
        )

    def _one_step(self, asked: Mapping[str, Any]) -> list[Difference]:
        """Make a step in both of what it is asked for, and return what differs, in the order of computation."""
        run, plain, number = self._run, self._plain, self._run.steps
        prepared = run._compiler.prepare(**asked)
        plain.left_out = self._left_out(asked.get("active_layers"))
        plain_step = self._plain_gradients(prepared, number)
        server = run._session.server
        watched, own = WatchedOptimizer(server.optimizer), server.optimizer
        server.optimizer = cast(BoundOptimizer, watched)
        try:
            metrics = self._make_step(**asked)
            run.synchronize()
        finally:
            server.optimizer = own
        found = self._differing_losses(metrics, plain_step, number)
        if metrics.skipped != plain_step.skipped:
            found.append(Difference(number, "", "loss", "skip", 1.0, 1.0))
            return found
        if not plain_step.skipped:
            found += self._differing_gradients(watched.gradients, plain_step, number)
        same = not found and self._tolerance > 0
        plain.update(plain_step, watched.gradients if same else None)
        found += self._differing_tensors(number, updates=not found)
        if plain.loss_scale != run.loss_scale:
            difference = abs(plain.loss_scale - run.loss_scale)
            found.append(Difference(number, "", "loss scale", "loss scale", difference, plain.loss_scale))
        if self._tolerance > 0 or plain.updates is None:
            plain.follow(self._tensors_of_run())
        return found

    def _plain_gradients(self, prepared: PreparedBatch, number: int) -> PlainStep:
        plain = self._plain
        if any(model.partition.loss_plan.is_rewritten for model in prepared.compiled):
            raise VerificationError(
                "The terms of this loss count differently in each micro-batch, or take values of the whole batch, so "
                "plain PyTorch has no loss of a micro-batch to compare with. Verify it with microbatches=1."
            )
        pieces = []
        rows = prepared.rows
        if self._over_batch:  # plain PyTorch has the whole batch, of which only the head may draw numbers
            refuse_other_batches(prepared.compiled[0])
            rows = rows[-1:]
        for piece, weight in zip(rows, prepared.weights, strict=True):
            inputs = self._filled(piece.tree, piece.tensors[: piece.input_count])
            rest = piece.tensors[piece.input_count :]
            targets = None if piece.target_tree is None else self._filled(piece.target_tree, rest)
            pieces.append(PlainPiece(inputs, targets, weight))
        draws = self._draws
        if draws is None:
            return plain.gradients(pieces, lambda microbatch: None, None)

        def begin(microbatch: int) -> None:
            draws.begin(places_of(prepared.compiled[microbatch]), number, microbatch)

        with draws.watching(), draws:
            return plain.gradients(pieces, begin, draws)

    def _left_out(self, active: ActiveLayers | None) -> tuple[str, ...]:
        names = layer_names(self._run._model, self._run._compiler.modules or [])
        taking_part = names if active is None else chosen_layers(names, active)
        return tuple(name for name in names if name not in taking_part)

    def _filled(self, tree: TensorTree, tensors: Sequence[torch.Tensor]) -> Any:
        """Inputs in their own memory, as a data loader gives them: rounding may depend on where a slice begins."""
        return tree.fill([tensor.clone().to(self._where) for tensor in tensors])

    # -- what differs -----------------------------------------------------------------------------------------

    def _differing_losses(self, metrics: Metrics, plain: PlainStep, number: int) -> list[Difference]:
        ours, theirs = (torch.tensor(loss, dtype=torch.float64) for loss in (metrics.loss, plain.loss))
        if self._same(ours, theirs, not self._exact, 0.0):
            return []
        last = next(reversed(self._order))
        return [Difference(number, last, "loss", "loss", _largest(ours - theirs), _largest(theirs))]

    def _differing_gradients(self, ours: Mapping[str, torch.Tensor], plain: PlainStep, number: int) -> list[Difference]:
        """Differing gradients, those of the last layer first, as the backward computes them."""
        found = []
        least = SMALL * max((_largest(one) for one in plain.gradients.values()), default=0.0)
        names = sorted({*ours, *plain.gradients}, key=lambda name: -self._order.get(self._layer_of.get(name, ""), -1))
        for name in names:
            layer = self._layer_of.get(name, "")
            if name not in ours or name not in plain.gradients:
                only = _largest(ours[name] if name in ours else plain.gradients[name])
                found.append(Difference(number, layer, name, "missing gradient", only, only))
                continue
            theirs = plain.gradients[name]
            mine = ours[name].to(theirs.dtype)
            if not self._same(mine, theirs, self._all_loose or name in self._tied, least):
                found.append(Difference(number, layer, name, "gradient", _largest(mine - theirs), _largest(theirs)))
        return found

    def _differing_tensors(self, number: int, updates: bool) -> list[Difference]:
        """Parameters that differ after the update (if `updates`: from equal gradients), then buffers."""
        ours, buffers = self._tensors_of_run(), self._plain.buffers()
        theirs = self._plain.tensors() if updates and self._plain.updates is not None else buffers
        found = []
        for name, tensor in theirs.items():
            buffer = name in buffers
            if not self._same(ours[name], tensor, buffer and not self._exact, 0.0):
                difference = _largest(ours[name].to(torch.float64) - tensor.to(torch.float64))
                kind, layer = "buffer" if buffer else "update", self._layer_of.get(name, "")
                found.append(Difference(number, layer, name, kind, difference, _largest(tensor)))
        return found

    def _same(self, ours: torch.Tensor, plain: torch.Tensor, loose: bool, least: float) -> bool:
        """Whether two tensors are equal (NaN where both have it), or if `loose` within the tolerance.

        The tolerance is relative to the largest value in `plain`, or to `least` if that is larger.
        """
        if torch.equal(ours, plain):
            return True
        if not plain.is_floating_point() or not torch.equal(ours.isnan(), plain.isnan()):
            return False
        ours, plain = ours.nan_to_num(), plain.nan_to_num()
        return torch.equal(ours, plain) or (
            loose and _largest(ours - plain) <= self._tolerance * max(_largest(plain), least)
        )

    # -- what there is to compare -----------------------------------------------------------------------------

    def _tensors_of_run(self) -> dict[str, torch.Tensor]:
        model, store = self._run._model, self._run._session.store
        return {name: store.read_from(name, one) for name, one in [*model.named_parameters(), *model.named_buffers()]}

    def _make_plain(self, model: Any, modules: Any, loss: Any) -> PlainRun:
        run = self._run
        names = {id(one): name for name, one in run._model.named_parameters()}
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            | {"names": [names[id(one)] for one in group["params"] if id(one) in names]}
            for group in run.param_groups
        ]
        states = {name: run._session.server.optimizer.state(name) for name in names.values()}
        scale = run._scale
        good, interval = (0, 1) if scale is None else (scale.good_steps, scale.growth_interval)
        return PlainRun(
            model,
            modules,
            loss,
            find_aliases(run._model),
            self._where,
            run.options,
            groups,
            states,
            (run.loss_scale, good),
            interval,
            run._model,
            run._compiler.held,
        )

    def _draws_numbers(self, prepared: PreparedBatch) -> bool:
        return any(place.draws or place.eager for model in prepared.compiled for place in places_of(model))

    def _make_draws(self, prepared: PreparedBatch) -> GivenDraws:
        names = {place.name.split("#")[0] for model in prepared.compiled for place in places_of(model)}
        layers: dict[str, nn.Module | None] = dict.fromkeys(names)
        if self._run._compiler.modules is None:
            known = dict(self._plain.model.named_modules())
            layers = {name: known[name] for name in names if name in known}
        return GivenDraws(self._run._seed, layers)

    def _loose_in_words(self) -> str:
        if self._over_batch:
            return "losses, gradients and buffers: plain PyTorch runs the layers on the whole batch at once"
        if not self._exact:
            return "losses, gradients and buffers, which another device computed"
        if self._chunked:
            return "losses and gradients, since the head runs over chunks of positions"
        if self._tied and self._all_loose:
            return f"gradients: {', '.join(sorted(self._tied))} is tied, and clipping by norm passes its rounding on"
        return f"gradients of tied weights: {', '.join(sorted(self._tied))}" if self._tied else ""

    def _compared_in_words(self) -> str:
        options = self._run.options
        what = "the loss, every gradient, every parameter after its update and every buffer"
        if self._plain.updates is None:
            chosen = type(options.optimizer).__name__ if options.optimizer is not None else "AdamW"
            narrow = f" with state_dtype={options.state_dtype!r}" if options.state_dtype != "fp32" else ""
            what = (
                f"the loss, every gradient and every buffer of each step. Not compared: the updates of {chosen}"
                f"{narrow}, which torch.optim does not have"
            )
        return what


def refuse_other_batches(compiled: CompiledModel) -> None:
    """Refuse a head over the whole batch after layers that plain PyTorch would run differently on all of the batch."""
    for place in places_of(compiled)[:-1]:
        if place.draws or place.eager:
            raise VerificationError(
                f"The head runs over the whole batch, and layer {place.name!r} draws random numbers for each "
                "micro-batch (or may, since it runs eagerly), so plain PyTorch on the whole batch is another "
                "computation. Set dropout to 0 for the comparison, or verify with microbatches=1."
            )
    for stage in compiled.stages[:-1]:
        if any(program.updates for program in stage.programs):
            raise VerificationError(
                f"The head runs over the whole batch, and {stage.segment.name!r} changes buffers for each micro-batch "
                "(BatchNorm), so plain PyTorch on the whole batch is another computation. Verify with microbatches=1."
            )


def _without_gradients(batch: Any) -> Any:
    """The batch with its tensors detached: a step adds to `.grad` of inputs that require a gradient."""
    tensors, tree = tensor_leaves(batch)
    if not any(tensor.requires_grad for tensor in tensors):
        return batch
    return tree.fill([tensor.detach() for tensor in tensors])


def _largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; infinite for NaN, 0 for no elements."""
    if tensor.numel() == 0:
        return 0.0
    found = float(tensor.detach().to(torch.float64).abs().max())
    return found if found == found else float("inf")
