"""Execution providers by short name: which there are, and how a session uses one and no other.

`cpu` is CPUExecutionProvider, `cuda` CUDAExecutionProvider, and so on for each provider of this build of ONNX Runtime;
providers of plug-in packages count once their library is registered. Invariant: a session that did not get the
requested provider is an error. ONNX Runtime itself would fall back to the CPU without an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hal.errors import Unavailable

_SUFFIX = "ExecutionProvider"

_OTHER_NAMES = {"directml": "dml", "tensorrt-rtx": "nvtensorrtrtx", "vitis": "vitisai"}
"""Names that people use for a provider whose class is called otherwise."""

_NOT_DEVICES = {"azure"}
"""Providers that call a service instead of computing."""


@dataclass(frozen=True)
class Provider:
    """An execution provider. `number` is that of its device; `plugged` are the devices of a plug-in."""

    short: str
    full: str
    number: int = 0
    plugged: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def is_cpu(self) -> bool:
        """Whether it is ONNX Runtime's own CPU provider."""
        return self.short == "cpu"


def runtime() -> Any:
    """The onnxruntime module. Raises Unavailable where it, or `onnx`, is not installed."""
    try:
        import onnx  # noqa: F401 - models are made with it
        import onnxruntime
    except ImportError as failure:
        raise Unavailable(
            f"ONNX Runtime devices need the packages onnxruntime and onnx: {failure}. "
            "Install them with: pip install 'layer-relay[onnx]'"
        ) from failure
    return onnxruntime


def known() -> dict[str, Provider]:
    """Every provider of this build, and of plug-ins registered in this process, by short name; `cpu` first."""
    ort = runtime()
    found = {}
    for full in ort.get_available_providers():
        short = full.removesuffix(_SUFFIX).lower()
        if short not in _NOT_DEVICES:
            found[short] = Provider(short, full)
    for device in getattr(ort, "get_ep_devices", list)():
        short = device.ep_name.removesuffix(_SUFFIX).lower()
        if short not in found or found[short].plugged:
            before = found[short].plugged if short in found else ()
            found[short] = Provider(short, device.ep_name, plugged=(*before, device))
    return dict(sorted(found.items(), key=lambda item: (item[0] != "cpu", item[0])))


def choose(selector: str) -> Provider:
    """The provider that a selector names, such as `cpu` (as is nothing at all), `cuda` or `cuda:1`.

    Raises Unavailable with what there is instead.
    """
    name, _, number = (selector or "cpu").lower().partition(":")
    providers = known()
    provider = providers.get(_OTHER_NAMES.get(name, name))
    if provider is None:
        raise Unavailable(
            f"ONNX Runtime here has no execution provider {name!r}. It has: {', '.join(providers)}. Others come with "
            "builds and plug-ins of their own (onnxruntime-gpu, onnxruntime-openvino, onnxruntime-directml, ...); "
            "install one of those in place of onnxruntime, or register a plug-in's library first."
        )
    if number and (not number.isdecimal() or provider.is_cpu):
        raise Unavailable(f"There is no device 'onnx:{selector}': after the provider comes a device's number, if any.")
    return Provider(provider.short, provider.full, int(number or 0), provider.plugged)


def attach(provider: Provider, options: Any) -> dict[str, Any]:
    """What to make a session with beside its options, so that it uses the provider."""
    if provider.plugged:
        if provider.number >= len(provider.plugged):
            raise Unavailable(f"{provider.full} has {len(provider.plugged)} devices; there is no {provider.number}.")
        options.add_provider_for_devices([provider.plugged[provider.number]], {})
        return {}
    settings = {} if provider.is_cpu or not provider.number else {"device_id": str(provider.number)}
    return {"providers": [(provider.full, settings)], "enable_fallback": 0}


def confirm(provider: Provider, session: Any) -> None:
    """Raises Unavailable where a session runs on another provider than the requested one."""
    got = session.get_providers()
    if provider.full not in got:
        raise Unavailable(
            f"Asked for {provider.full}, ONNX Runtime made a session on {', '.join(got)}: the provider is listed but "
            "does not start, mostly for want of its driver or of a library that it loads."
        )
