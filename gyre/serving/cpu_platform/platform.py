"""The platform class that SGLang instantiates on CPU."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CpuTorchPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang is not typed
    """Plain torch on CPU: an out-of-tree platform takes SGLang's `forward_native` paths and needs no `sgl_kernel`."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()  # no triton, no graphs, no compiled kernels

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """Never: there is no device to copy to."""
        return False

    def get_default_attention_backend(self) -> str:
        """Scaled dot-product attention of torch."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Which `forward_*` of a layer runs."""
        return "native"
