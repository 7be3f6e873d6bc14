"""`RelayMixin`: put before a `transformers.Trainer`, it makes the steps of that trainer Relay's.

The library's loop stays: arguments, collator, callbacks, schedules, metrics, logging, evaluation and saving. Replaced
are what a step does, the optimizer and its state, and where the model lies. Batches that are accumulated are the
micro-batches of one step. Invariant: losses, gradient norms and weights are those of the library's trainer on the same
batches, to the bit on devices that run PyTorch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer_pt_utils import nested_detach

from hal.errors import OutOfMemory
from relay.eps.bind_optimizer import as_spec
from relay.hf.generation import generate
from relay.hf.loss_module import COUNT, WITHOUT_LOSS, LossModule, widened
from relay.hf.optimizer import LoopOptimizer, arguments_of, choose, full_groups
from relay.hf.pairs import cut_pairs, join_pairs, join_rows, on_host
from relay.hf.refusals import check_arguments, check_class, check_model, check_options
from relay.hf.trl_loss import PACKING, TrlLoss, kind_of
from relay.metrics import Metrics
from relay.models.save_pretrained import save_pretrained
from relay.trainer import Trainer as LayerTrainer

logger = logging.getLogger("relay")

MANY_SHAPES = 8
"""So many shapes of training batches bring a message about padding."""

HALF = (torch.float16, torch.bfloat16)


class RelayMixin(Trainer):
    """A `transformers.Trainer` whose steps run through `relay.Trainer`.

    Write it before a trainer class: `class Mine(relay.hf.RelayMixin, MyTrainer)`. Besides what that class takes:

    Args:
        relay: options of `relay.Trainer`, such as `{"device": "cuda:0", "stash": "host", "state_dtype": "int8"}`.
            Precision, clipping, groups and seed are the training arguments'. `microbatches` (1 if not given) cuts each
            batch; with `gradient_accumulation_steps` each accumulated batch is a micro-batch already. `optimizer` takes
            the place of `optim` and `learning_rate`.

    Attributes:
        relay_trainer: the `relay.Trainer`, made when training or evaluation begins; None before.
        relay_metrics: the `relay.Metrics` of the last step; None before.

    Raises:
        ValueError, TypeError: an argument that Relay cannot follow, by name.
    """

    def __init__(self, *args: Any, relay: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        check_class(type(self))
        self.relay_options = check_options(relay or {})
        self.relay_trainer: LayerTrainer | None = None
        self.relay_metrics: Metrics | None = None
        self._relay_pending: list[dict[str, Any]] = []
        self._relay_losses: LossModule | None = None
        self._relay_shapes: set[Any] = set()
        self._relay_pairs = 0
        super().__init__(*args, **kwargs)

    # -- before training --------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args, self.relay_options.get("microbatches", 1))
        _ = self.args.device  # counts the GPUs
        self.args._n_gpu = 1
        super().create_accelerator_and_postprocess()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        found.pop("dynamo_plugin", None)
        return {**found, "mixed_precision": "no", "device_placement": False}

    def _validate_args(self) -> None:
        check_model(self._library_model)
        super()._validate_args()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The model stays in host memory."""

    def _prepare_input(self, data: Any) -> Any:
        """Batches stay in host memory: their micro-batches are sent to the device."""
        if isinstance(data, Mapping):
            return type(data)({key: self._prepare_input(value) for key, value in data.items()})  # type: ignore[call-arg]
        if isinstance(data, (tuple, list)):
            return type(data)(self._prepare_input(value) for value in data)
        return data.cpu() if isinstance(data, torch.Tensor) else data

    @property
    def relay_precision(self) -> str:
        """What the device computes in: "bf16", "fp16" or "fp32"."""
        return "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else "fp32"

    @property
    def _library_model(self) -> nn.Module:
        """The model, which the library's own annotations take for None as well."""
        return cast(nn.Module, self.model)

    def _computes_own_loss(self) -> bool:
        """Whether the loss is another than the model's own."""
        return (
            type(self).compute_loss is not Trainer.compute_loss
            or self.label_smoother is not None
            or self.compute_loss_func is not None
            or not getattr(getattr(self.model, "config", None), "return_dict", False)
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the relay's trainer, and the optimizer that the loop holds."""
        if getattr(self.model, "is_activation_checkpointing", False):  # layers are recomputed in any case
            cast(Any, self.model).activation_checkpointing_disable()
        if self.relay_trainer is not None and self.optimizer is None:  # model_init has made another model
            self.relay_trainer.close()
            self.relay_trainer = None
        if self.relay_trainer is not None:
            return self._loop_optimizer
        options = dict(self.relay_options)
        given = self.optimizer
        own = options.pop("optimizer", None)
        cls: type | None = None
        kwargs: dict[str, Any] = {}
        if own is not None:
            if given is not None:
                raise ValueError("Both optimizers=(...) and relay={'optimizer': ...} were given. Leave one out.")
            spec = own
        elif given is not None:
            cls, kwargs = type(given), arguments_of(given)
        elif self.optimizer_cls_and_kwargs is not None:
            cls, kwargs = self.optimizer_cls_and_kwargs
        else:
            cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, cast(Any, self.model))
        if cls is not None:
            spec = choose(cls, kwargs, options.get("state_dtype", "fp32") != "fp32")
        groups = [dict(group) for group in given.param_groups] if given is not None else self._decay_groups()
        known = {"params", *as_spec(spec).defaults()}
        kind = kind_of(type(self))
        if kind is not None:
            self._relay_losses = TrlLoss(self._library_model, self, kind)
        elif self._computes_own_loss():
            self._relay_losses = LossModule(self._library_model, self)
        half = any(parameter.dtype in HALF for parameter in self._library_model.parameters())
        options = {
            "device": "cpu" if self.args.device.type == "cpu" else str(self.args.device),
            "microbatches": 1,
            "master_weights": "as_given" if half else "fp32",
            **options,
        }
        if isinstance(self._relay_losses, TrlLoss) and kind != "sft":
            self._relay_losses.pieces = self._relay_pairs = options["microbatches"]
            options["microbatches"] = 1  # a batch of pairs is cut here
        trainer = LayerTrainer(
            self._relay_losses or self._library_model,
            optimizer=spec,
            precision=self.relay_precision,
            clip_grad_norm=self.args.max_grad_norm if self.args.max_grad_norm > 0 else None,
            param_groups=[
                {key: value for key, value in group.items() if key in known} for group in groups if group["params"]
            ],
            seed=self.args.seed,
            on_nonfinite="log",
            **options,
        )
        self.relay_trainer = trainer
        whole = full_groups(cls, kwargs, groups, trainer.optimizer.defaults)
        self.optimizer = optimizer = LoopOptimizer(trainer.optimizer, whole, given)
        return optimizer

    @property
    def _loop_optimizer(self) -> LoopOptimizer:
        return cast(LoopOptimizer, self.optimizer)

    def _decay_groups(self) -> list[dict[str, Any]]:
        """The library's two groups: parameters with weight decay, and norms and biases without."""
        names = set(self.get_decay_parameter_names(self._library_model))
        trained = [(name, one) for name, one in self._library_model.named_parameters() if one.requires_grad]
        own = self.relay_options.get("optimizer")
        if own is not None:
            decays = "weight_decay" in own.defaults() if hasattr(own, "defaults") else True
            without = {"weight_decay": 0.0} if decays else {}
            kept = {}
        else:
            kept, without = {"weight_decay": self.args.weight_decay}, {"weight_decay": 0.0}
        return [
            {"params": [one for name, one in trained if name in names], **kept},
            {"params": [one for name, one in trained if name not in names], **without},
        ]

    def _ready_relay(self) -> LayerTrainer:
        """The relay's trainer, made now if evaluation comes before training."""
        if self.relay_trainer is None:
            self.create_optimizer()
        assert self.relay_trainer is not None
        if self._relay_losses is not None:
            self._relay_losses.look_again()
        return self.relay_trainer

    # -- steps ------------------------------------------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._relay_pending.clear()  # of a run that was stopped between two accumulated batches
        return super()._inner_training_loop(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Keep the batch until the last of those that are accumulated, then make one step on all of them."""
        model.train()
        self._relay_pending.append(self._relay_batch(inputs, num_items_in_batch))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        pieces, self._relay_pending = self._relay_pending, []
        scaled = self._is_scaled(num_items_in_batch)
        losses = self._relay_step(pieces, 1.0 if scaled else 1.0 / self.current_gradient_accumulation_steps)
        if not scaled:
            losses = [loss / self.current_gradient_accumulation_steps for loss in losses]
        losses = [loss.to(self.args.device) for loss in losses]
        for loss in losses[:-1]:  # as the loop adds them, one by one
            if self.args.logging_nan_inf_filter and not torch.isfinite(loss):
                self._tr_loss += self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
            else:
                self._tr_loss += loss
        return losses[-1]

    def _relay_batch(self, inputs: Mapping[str, Any], count: torch.Tensor | int | None) -> dict[str, Any]:
        """A batch as the relay's trainer takes it, with the number of items where the loss takes one."""
        self._ready_relay()
        batch = dict(self._prepare_inputs(dict(inputs)))
        if "flash" not in str(getattr(getattr(self.model, "config", None), "_attn_implementation", "")):
            batch = {name: one for name, one in batch.items() if name not in PACKING}
        if count is not None and (self._relay_losses is not None or self.model_accepts_loss_kwargs):
            batch[COUNT] = self._prepare_input(torch.as_tensor(count))
        return batch

    def _is_scaled(self, count: torch.Tensor | int | None) -> bool:
        """Whether the loss of an accumulated batch is its part of the loss of all, as the library decides it."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        return bool(self.model_accepts_loss_kwargs and count is not None) or self.compute_loss_func is not None

    def _relay_step(self, batches: list[dict[str, Any]], weight: float) -> list[torch.Tensor]:
        """One step on the batches, each with this weight. Returns the loss of each, before the weight."""
        relay, losses = self._ready_relay(), self._relay_losses
        names: list[str] = []
        if isinstance(losses, TrlLoss):
            names = losses.output_names()
            batches = [losses.with_reference(relay, batch) for batch in batches]
        try:
            if relay.options.microbatches > 1:  # there is one batch, and it is cut
                metrics = relay.step(batches[0], outputs=names)
                outputs = [{"loss": torch.tensor(metrics.loss), **join_rows(metrics.outputs)}]
            else:
                pieces, shares = batches, [1.0] * len(batches)
                if self._relay_pairs > 1:
                    pieces, shares = cut_pairs(batches[0], self._relay_pairs)
                self._watch_shapes(pieces)
                weights = [weight * share for share in shares]
                metrics = relay.step(pieces=pieces, weights=weights, outputs=["loss", *names])
                outputs = [found for found in metrics.outputs if found is not None]
                if self._relay_pairs > 1:
                    outputs = [join_pairs(outputs, shares)]
        except OutOfMemory as failure:
            if not self.args.auto_find_batch_size:
                raise
            raise RuntimeError(f"{failure} The device is out of memory.") from failure  # what the search looks for
        self.relay_metrics = metrics
        self._loop_optimizer.step_was_skipped = metrics.skipped
        if isinstance(losses, TrlLoss):
            for batch, found in zip(batches, outputs, strict=True):
                losses.record(batch, on_host(found))
        return [found["loss"].cpu() for found in outputs]

    def _watch_shapes(self, pieces: list[dict[str, Any]]) -> None:
        """Say once that batches of many shapes are compiled one by one."""
        if len(self._relay_shapes) >= MANY_SHAPES:
            return
        for piece in pieces:
            shapes = {key: tuple(one.shape) for key, one in piece.items() if isinstance(one, torch.Tensor)}
            self._relay_shapes.add(tuple(sorted(shapes.items())))
        if len(self._relay_shapes) >= MANY_SHAPES:
            logger.warning(
                "The batches have had %d shapes so far, and each is compiled by itself, which takes seconds. Pad them "
                "to a few lengths: pad_to_multiple_of= of the collator, or relay={'buckets': relay.Buckets((128,))}.",
                MANY_SHAPES,
            )

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> torch.Tensor:
        """The norm of the step's gradients, before they were clipped."""
        assert self.relay_metrics is not None
        return torch.tensor(self.relay_metrics.grad_norm)

    # -- evaluation -------------------------------------------------------------------------------------------

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """The loss, outputs and labels of a batch, through the relay."""
        relay = self._ready_relay()
        if isinstance(self._relay_losses, TrlLoss):
            batch = self._relay_batch(inputs, None)
            found, logits, labels = self._relay_losses.predict(relay, batch, prediction_loss_only)
            return found.to(self.args.device), logits, labels
        named = [inputs.get(name) for name in self.label_names]
        has_labels = bool(named) and all(label is not None for label in named)
        returns_loss = inputs.get("return_loss")
        returns_loss = self.can_return_loss if returns_loss is None else returns_loss
        has_loss = has_labels or (not self.label_names and returns_loss)
        labels = None
        if has_loss:
            labels = nested_detach(tuple(self._prepare_input(label) for label in named))
            labels = labels[0] if len(labels) == 1 else labels
        if ignore_keys is None:
            ignore_keys = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", ["cache"])
        count = self._get_num_items_in_batch([inputs], self.args.device) if has_loss else None
        batch = self._relay_batch(inputs, count)
        if has_loss and prediction_loss_only:
            return torch.tensor(relay.evaluate(batch).loss, device=self.args.device), None, None
        if not has_loss and self._relay_losses is not None:
            batch[WITHOUT_LOSS] = True
        outputs = widened(relay.predict(batch))
        loss = outputs["loss"] if isinstance(outputs, Mapping) and has_loss else outputs[0] if has_loss else None
        if prediction_loss_only:
            return loss, None, None
        if isinstance(outputs, Mapping):
            ignored = [*ignore_keys, *(["loss"] if has_loss else [])]
            logits = tuple(value for key, value in outputs.items() if key not in ignored)
        else:
            logits = outputs[1:] if has_loss else outputs
        logits = nested_detach(logits)
        return None if loss is None else loss.detach().mean(), logits[0] if len(logits) == 1 else logits, labels

    def generate(
        self, prompts: torch.Tensor | Sequence[str], attention_mask: torch.Tensor | None = None, **given: Any
    ) -> Any:
        """Continue prompts through the relay, between steps or instead of them.

        `prompts` are tokens (rows, tokens), padded on the left, with `attention_mask`: tokens are returned, as
        `model.generate` does. Or they are texts, for the trainer's tokenizer: the new texts are returned. `given` is
        what `relay.hf.generation.generate` takes: `max_new_tokens`, `temperature`, `top_p`, `eos_token_id`,
        `pad_token_id`, `seed`.
        """
        relay, tokenizer = self._ready_relay(), cast(Any, self.processing_class)
        if isinstance(prompts, torch.Tensor):
            return generate(relay, self._library_model, prompts, attention_mask, **given)
        if tokenizer is None:
            raise ValueError("Texts need a tokenizer: give the trainer processing_class=, or give tokens as a tensor.")
        rows = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
        found = generate(relay, self._library_model, rows["input_ids"], rows["attention_mask"], **given)
        return tokenizer.batch_decode(found[:, rows["input_ids"].shape[1] :], skip_special_tokens=True)

    # -- saving and loading -----------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the model, one tensor at a time where its library's folder is known."""
        if self.relay_trainer is not None:
            self.relay_trainer.synchronize()
        if state_dict is None and self.relay_trainer is not None and isinstance(self.model, PreTrainedModel):
            folder = str(output_dir or self.args.output_dir)
            os.makedirs(folder, exist_ok=True)
            save_pretrained(self.model, self.model.state_dict(), folder, masters=None)
            tokenizer: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, "training_args.bin"))
        else:
            super()._save(output_dir, state_dict)

    def _load_best_model(self) -> None:
        if self.relay_trainer is not None:
            self.relay_trainer.synchronize()
        super()._load_best_model()
        if self.relay_trainer is not None:
            self.relay_trainer.synchronize()  # takes what was written

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.relay_trainer is not None:
            self.relay_trainer.synchronize()
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.relay_trainer is not None:
            self.relay_trainer.synchronize()
