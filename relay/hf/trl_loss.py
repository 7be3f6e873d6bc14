"""The losses of trl's SFT, DPO and reward trainers, traced with the model, and their metrics from what a step returns.

trl's own `compute_loss` is used twice. Traced, it gives the loss; the fused head of trl, an autograd function without a
graph, is plain log-softmax there, and what only metrics need is left out. After the step it runs once more, on the
outputs that the training forward returned, and writes the metrics as it always does. Invariant: the model is not run
for metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from relay.hf.loss_module import COUNT, WITHOUT_LOSS, LossModule, Widened, by_name, widened
from relay.hf.pairs import cut_pairs, join_pairs, on_host

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What the fused head gives for each token, in the order in which trl's function returns it."""

REFERENCE = "reference_log_probs"
AS_REFERENCE = "relay_as_reference"
"""An entry of a batch for which the model is the reference: only log-probabilities are computed."""

PRECOMPUTED = ("ref_chosen_logps", "ref_rejected_logps")

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What only kernels for packed rows read. Each new value would be compiled anew."""


MIXES_PAIRS = ("aot", "aot_unpaired", "bco_pair")
"""Losses of DPO that compare pairs with each other."""


class TrlLoss(LossModule):
    """(batch) -> the loss of a trl trainer, and the outputs that its metrics are computed from.

    Args:
        inner: the model that is trained.
        trainer: an SFTTrainer, DPOTrainer or RewardTrainer. A reference model of it is a part of this module.
        kind: "sft", "dpo" or "reward".

    Attributes:
        pieces: micro-batches that a batch of pairs is cut into.
    """

    def __init__(self, inner: nn.Module, trainer: Any, kind: str) -> None:
        check(trainer, kind)
        super().__init__(inner, trainer)
        self.kind = kind
        self.pieces = 1
        reference = getattr(trainer, "ref_model", None)
        if reference is not None:
            self.reference = reference.requires_grad_(False)
        self.train(inner.training)

    def forward(self, **inputs: Any) -> dict[str, Any]:
        trainer, _ = self.__dict__["owner"](), self.watched
        inner = Widened(self.inner) if trainer.relay_precision != "fp32" else self.inner
        if inputs.pop(WITHOUT_LOSS, False):
            return by_name(inner(**inputs))
        count = inputs.pop(COUNT, None)
        if self.kind == "reward":
            with _as_traced(trainer, inner, []) as model:
                loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True)
            return {"loss": loss, "logits": outputs.logits}
        calls: list[dict[str, torch.Tensor]] = []
        rows = len(inputs["input_ids"])
        if inputs.pop(AS_REFERENCE, False):
            labels = _completions(inputs)
            with _as_traced(trainer, inner, calls) as model:
                model(**inputs, labels=labels, fused_lm_head=True, use_cache=False)
            return {REFERENCE: calls[0]["log_probs"].view(rows, -1)}
        with _as_traced(trainer, inner, calls, known=PRECOMPUTED[0] in inputs) as model:
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=count)
        found: dict[str, Any] = {name: one.view(rows, -1).detach() for name, one in calls[0].items()}
        if len(calls) > 1:
            found[REFERENCE] = calls[1]["log_probs"].view(rows, -1).detach()
        if model.aux_loss is not None:
            found["aux_loss"] = model.aux_loss.detach()
        return {"loss": loss, **found}

    def output_names(self) -> list[str]:
        """The outputs of the training forward that `record` needs."""
        trainer = self.__dict__["owner"]()
        if self.kind == "reward":
            return ["logits"]
        names = ["log_probs", "entropy", "is_top1"]
        if self.kind == "dpo":
            names += ["mean_logits", *(["log_sum_sq_probs"] if trainer.use_weighting else [])]
            names += [REFERENCE] if hasattr(self, "reference") and not trainer.precompute_ref_logps else []
        return names + (["aux_loss"] if trainer.aux_loss_enabled else [])

    def with_reference(self, relay: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch, with the log-probabilities of the reference where that is the model without its adapter.

        They are computed by a forward of their own, since a layer is captured as it is before the step.
        """
        trainer = self.__dict__["owner"]()
        if self.kind != "dpo" or trainer.precompute_ref_logps or hasattr(self, "reference"):
            return batch
        model = trainer.model
        with _adapter_off(model):
            pieces, shares = cut_pairs(batch, self.pieces)
            output = join_pairs([on_host(relay.predict({**piece, AS_REFERENCE: True})) for piece in pieces], shares)
        found = {"log_probs": output[REFERENCE]}
        replay = _Replay(model, lambda labels: _fused_output(found, labels))
        with _replaced(trainer, model=replay, ref_model=replay):  # so that trl does not look for an adapter
            log_probs = trainer.compute_ref_log_probs(replay, dict(batch))
        chosen, rejected = log_probs
        return {**batch, PRECOMPUTED[0]: chosen, PRECOMPUTED[1]: rejected}

    def predict(self, relay: Any, batch: dict[str, Any], loss_only: bool) -> tuple[torch.Tensor, Any, Any]:
        """The loss of a batch in an evaluation, with trl's metrics; and outputs and labels, unless `loss_only`."""
        batch = self.with_reference(relay, batch)
        pieces, shares = cut_pairs(batch, self.pieces) if self.pieces > 1 else ([batch], [1.0])
        outputs = join_pairs([on_host(relay.predict(piece)) for piece in pieces], shares)
        self.record(batch, outputs)
        if loss_only:
            return outputs["loss"], None, None
        logits = outputs.get("logits")
        if logits is None:
            given = (*PRECOMPUTED, "completion_mask", "labels")
            alone = {name: one for name, one in batch.items() if name not in given}
            logits = widened(relay.predict({**alone, WITHOUT_LOSS: True}))["logits"]
        return outputs["loss"], logits, batch.get("labels", batch["input_ids"] if self.kind == "dpo" else None)

    def record(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Let trl compute its metrics of a batch, from the outputs of the step or of an evaluation."""
        trainer = self.__dict__["owner"]()
        inputs = dict(batch)
        count = inputs.pop(COUNT, None)
        policy: Any
        if self.kind == "reward":
            policy = _Replay(trainer.model, lambda _: SimpleNamespace(logits=outputs["logits"]))
        else:
            policy = _Replay(trainer.model, lambda labels: _fused_output(outputs, labels))
        known = {"log_probs": outputs.get(REFERENCE)}
        reference = _Replay(trainer.model, lambda labels: _fused_output(known, labels))
        stand_ins = {"model": policy, "ref_model": reference}
        if PRECOMPUTED[0] in inputs:
            stand_ins["precompute_ref_logps"] = True
        with _replaced(trainer, **stand_ins), torch.no_grad():
            trainer.compute_loss(policy, inputs, num_items_in_batch=count)


def check(trainer: Any, kind: str) -> None:
    """Raise ValueError for a loss that cannot be traced, or whose batch cannot be cut."""
    found = []
    if kind == "sft" and (trainer.compute_loss_func is not None or trainer.label_smoother is not None):
        found.append(
            "compute_loss_func= and label_smoothing_factor= make SFTTrainer run the model twice. Use "
            "relay.hf.RelayTrainer on the tokenized rows"
        )
    types = trainer.loss_types if kind == "dpo" else []
    if "sft" in types:
        found.append("loss_type='sft' selects tokens by a mask, so its shapes depend on the batch. Leave it out")
    mixing = [name for name in types if name in MIXES_PAIRS]
    if mixing and trainer.relay_options.get("microbatches", 1) > 1:
        found.append(f"loss_type={mixing[0]!r} compares pairs, so a batch cannot be cut. Use microbatches=1")
    if found:
        raise ValueError(f"{type(trainer).__name__}: " + "; ".join(found) + ".")


def kind_of(trainer: type) -> str | None:
    """Which of trl's trainers a class is of: "sft", "dpo" or "reward"; None for one of transformers."""
    names = {base.__name__ for base in trainer.__mro__ if base.__module__.split(".")[0] == "trl"}
    kinds = {"SFTTrainer": "sft", "DPOTrainer": "dpo", "RewardTrainer": "reward"}
    return next((kind for name, kind in kinds.items() if name in names), None)


def _completions(inputs: dict[str, Any]) -> torch.Tensor:
    """The labels of a batch of pairs. What is no input of a model is taken out of the batch."""
    mask = inputs.pop("completion_mask")
    labels: torch.Tensor = inputs["input_ids"].masked_fill(mask == 0, -100)
    return labels


@contextmanager
def _adapter_off(model: Any) -> Iterator[None]:
    """A model without its adapter, or with the one named "ref" that trl copied from the adapter it began with.

    Only the flags of the layers are set: peft's own switch makes new lists of names, which would be a change of the
    code each time.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from trl.trainer.utils import use_adapter

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if "ref" in model.peft_config or not layers:
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            yield
        return
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


@contextmanager
def _replaced(trainer: Any, **attributes: Any) -> Iterator[None]:
    """A trainer with other attributes."""
    own = vars(trainer)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


def _fused_output(outputs: Mapping[str, Any], labels: torch.Tensor) -> Any:
    """What trl's fused head returns, from recorded values of each token."""
    from trl.trainer.utils import FusedCausalLMOutput

    mask = labels[:, 1:] != -100
    found = {name: outputs.get(name) for name in FIELDS}
    found = {name: None if one is None else one.masked_fill(~mask, 0) for name, one in found.items()}
    return FusedCausalLMOutput(**found, label_mask=mask, aux_loss=outputs.get("aux_loss"))


class _Replay:
    """Stands for a model whose outputs are known. Everything but a call is the model's."""

    is_gradient_checkpointing = False

    def __init__(self, model: Any, outputs: Any) -> None:
        self.__dict__.update(_model=model, _outputs=outputs)

    def __call__(self, **inputs: Any) -> Any:
        return self.__dict__["_outputs"](inputs.get("labels"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


class _Called:
    """A model that is traced, with `item` as it is while it runs. It keeps the last auxiliary loss."""

    def __init__(self, model: Any, item: Any) -> None:
        self.__dict__.update(_model=model, _item=item)
        self.aux_loss: torch.Tensor | None = None

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        with _method(torch.Tensor, "item", self.__dict__["_item"]):
            output = self.__dict__["_model"](*args, **inputs)
        self.aux_loss = getattr(output, "aux_loss", None)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


@contextmanager
def _as_traced(
    trainer: Any, inner: Any, calls: list[dict[str, torch.Tensor]], known: bool = False
) -> Iterator[_Called]:
    """Around trl's `compute_loss` in a trace: metrics go nowhere; the fused head is plain, and written to `calls`."""
    from trl.trainer import utils

    aside: dict[str, Any] = {
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_total_train_tokens": trainer._total_train_tokens,
    }
    if known:  # the batch has the reference's log-probabilities
        aside["precompute_ref_logps"] = True
    plain = SimpleNamespace(apply=lambda *given: _plain_head(calls, *given))
    item = torch.Tensor.item
    with (
        _replaced(trainer, **aside),
        _method(torch.Tensor, "item", lambda tensor: 0.0),
        _method(utils, "_ChunkedLogProbFunction", plain),
    ):
        yield _Called(inner, item)


@contextmanager
def _method(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A name of a class or module with another value."""
    known = vars(owner).get(name, owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if known is owner:
            delattr(owner, name)
        else:
            setattr(owner, name, known)


def _plain_head(
    calls: list[dict[str, torch.Tensor]],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    _chunk_size: int,
    softcap: float | None = None,
    scale: float = 1.0,
    outputs: tuple[str, ...] = FIELDS[1:],
) -> tuple[Any, ...]:
    """The fused head as plain operations: for each token its log-probability, and what `outputs` name."""
    logits = nn.functional.linear(hidden, weight, bias).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    norm = logits.logsumexp(-1)
    log_probs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - norm
    found = {"log_probs": log_probs}
    fixed, fixed_norm = logits.detach(), norm.detach()
    if "entropy" in outputs:
        found["entropy"] = fixed_norm - ((fixed - fixed_norm.unsqueeze(-1)).exp() * fixed).sum(-1)
    if "log_sum_sq_probs" in outputs:
        found["log_sum_sq_probs"] = (2 * (fixed - fixed_norm.unsqueeze(-1))).logsumexp(-1)
    if "mean_logits" in outputs:
        found["mean_logits"] = fixed.mean(-1)
    if "is_top1" in outputs:
        found["is_top1"] = fixed.argmax(-1) == targets
    calls.append(found)
    unused = {name for name in ("entropy", "mean_logits", "is_top1") if name in found}
    return tuple(_UNUSED if name in unused else found.get(name) for name in FIELDS)


class _Unused:
    """Stands for values that only metrics are computed from. What is computed from it is it again."""

    def _same(self, *args: Any, **kwargs: Any) -> _Unused:
        return self

    __getitem__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __and__ = __rand__ = __add__ = __radd__ = _same
    view = masked_fill = detach = sum = mean = float = _same

    def chunk(self, chunks: int, dim: int = 0) -> tuple[_Unused, ...]:
        return (self,) * chunks

    def item(self) -> Any:
        return 0.0


_UNUSED = _Unused()
