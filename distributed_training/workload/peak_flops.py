"""Peak arithmetic rates of GPUs, against which MFU is measured.

The figures are dense (without structured sparsity), for matrix multiplications that accumulate in
fp32. GeForce boards multiply fp16 with fp32 accumulation at half the rate that NVIDIA advertises.
For a device that is not in the table no MFU is reported: a wrong MFU is worse than none.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from distributed_training.errors import UserError
from distributed_training.files.user_files import shown

if TYPE_CHECKING:
    import torch


class Peak(NamedTuple):
    """The peak arithmetic rates of one GPU model."""

    name: str  # regular expression for torch's name, without vendor and hyphens
    half: float  # TFLOP/s in fp16, and in bf16 if `bf16` is true
    tf32: float | None  # TFLOP/s in TF32; None if the device has none, or torch does not use it
    fp32: float  # TFLOP/s in fp32 (of AMD's matrix cores)
    source: str  # the vendor's document
    bf16: bool = True  # whether the matrix units multiply bf16

    @property
    def title(self) -> str:
        """The name without the variants that have the same rates."""
        return re.split(r" ?[(\\]", self.name)[0]

    def flops(self, precision: str, tf32: bool = True) -> float | None:
        """Return the peak rate in FLOP/s; None if the matrix units lack the precision.

        Args:
            tf32: multiply fp32 in TF32 if the device has it, as real_model_example.py does.
        """
        if precision == "fp32":
            return 1e12 * (self.tf32 if self.tf32 and tf32 else self.fp32)
        return 1e12 * self.half if precision == "fp16" or self.bf16 else None


PEAKS = (
    Peak("B200", 2250, 1125, 75, "HGX B200 (Blackwell datasheet)"),
    Peak(r"GH200 \d+GB", 989.4, 494.7, 66.9, "GH200 Grace Hopper datasheet"),
    Peak("H200", 989.4, 494.7, 66.9, "H200 datasheet, SXM"),
    Peak("H200 NVL", 835.5, 417.5, 60, "H200 datasheet, NVL"),
    Peak("H100 80GB HBM3", 989.4, 494.7, 66.9, "H100 architecture whitepaper, SXM5"),
    Peak("H100 PCIe", 756, 378, 51.2, "H100 architecture whitepaper, PCIe"),
    Peak("H100 NVL", 835.5, 417.5, 60, "H100 datasheet, NVL"),
    Peak(r"A100( SXM4 (40|80)GB| PCIE 40GB| 80GB PCIe)", 312, 156, 19.5, "A100 datasheet"),
    Peak("A30", 165, 82, 10.3, "A30 datasheet"),
    Peak("A40", 149.7, 74.8, 37.4, "A40 datasheet"),
    Peak("A10", 125, 62.5, 31.2, "A10 datasheet"),
    Peak("L40S", 362.05, 183, 91.6, "L40S datasheet"),
    Peak("L40", 181.05, 90.5, 90.5, "L40 datasheet"),
    Peak("L4", 121, 60, 30.3, "L4 datasheet"),
    Peak("RTX A6000", 154.8, 77.4, 38.7, "GA102 architecture whitepaper"),
    Peak("RTX 6000 Ada Generation", 364.2, 182.1, 91.1, "RTX 6000 Ada datasheet"),
    Peak("GeForce RTX 3090", 71, 35.6, 35.6, "GA102 architecture whitepaper"),
    Peak("GeForce RTX 3090 Ti", 80, 40, 40, "Ada architecture whitepaper, comparison"),
    Peak("GeForce RTX 4090", 165.2, 82.6, 82.6, "Ada architecture whitepaper"),
    Peak("GeForce RTX 5090", 209.5, 104.8, 104.8, "RTX Blackwell architecture whitepaper"),
    Peak("GeForce RTX 2080 Ti", 53.8, None, 13.4, "Turing architecture whitepaper", bf16=False),
    Peak("Quadro RTX (6000|8000)", 130.5, None, 16.3, "Turing architecture whitepaper", bf16=False),
    Peak("T4", 65, None, 8.1, "T4 datasheet", bf16=False),
    Peak(r"V100 SXM2 (16|32)GB", 125, None, 15.7, "V100 datasheet, SXM2", bf16=False),
    Peak(r"V100 PCIE (16|32)GB", 112, None, 14, "V100 datasheet, PCIe", bf16=False),
    Peak(r"V100S PCIE 32GB", 130, None, 16.4, "V100 datasheet, V100S", bf16=False),
    # On ROCm torch multiplies fp32 in fp32 unless HIPBLASLT_ALLOW_TF32 is set. Each of the two dies
    # of an MI250(X) is a separate device.
    Peak("Instinct MI210", 181, None, 45.3, "MI210 datasheet"),
    Peak("Instinct MI250", 362.1 / 2, None, 90.5 / 2, "MI250 datasheet"),
    Peak("Instinct MI250X", 383 / 2, None, 95.7 / 2, "MI250X datasheet"),
    Peak("Instinct MI300A", 980.6, None, 122.6, "MI300A datasheet"),
    Peak("Instinct MI300X", 1307.4, None, 163.4, "MI300X datasheet"),
    Peak("Instinct MI325X", 1307.4, None, 163.4, "MI325X datasheet"),
)


def find(name: str) -> Peak | None:
    """Return the entry of a device by the name that torch.cuda.get_device_name() reports.

    None for an unknown device, and for a MIG slice, which is only a part of a GPU.
    """
    name = re.sub("^(NVIDIA|Tesla|AMD) ", "", name.strip()).replace("-", " ")
    return next((peak for peak in PEAKS if re.fullmatch(peak.name, name, re.IGNORECASE)), None)


def find_by_short_name(name: str) -> Peak:
    """Return the entry of a device as a user writes it: "A100", "A100 80GB", "rtx 4090"."""
    words = name.strip().replace("-", " ")
    for series in ("", "GeForce ", "Instinct "):
        if peak := find(series + words):
            return peak
    word = re.sub(r" *\b\d+ ?GB\b", "", words, flags=re.IGNORECASE).lower()
    # "RTX 6000" may be a Quadro or an Ada.
    matches = [p for p in PEAKS if word in p.title.lower() or p is find(f"Quadro {words}")]
    if len(matches) != 1:
        problem = "is the name of several devices" if matches else "is not a known device"
        known = ", ".join(peak.title for peak in matches or PEAKS)
        raise UserError(f"--device {shown(name)} {problem}: use one of {known}.")
    return matches[0]


def flops_per_token(
    matmul: int, trained_matmul: int, layers: int, hidden: int, seq_length: int
) -> float:
    """Return the floating-point operations per token of the forward and backward passes.

    The formula is 6N + 12·L·H·T (PaLM, arXiv 2204.02311, appendix B) with N the parameters that
    take part in matrix multiplications (`matmul`). Of the 6 operations per parameter, 2 are its
    own gradient, which a frozen parameter does not have (`trained_matmul` counts the others).
    """
    return 4 * matmul + 2 * trained_matmul + 12 * layers * hidden * seq_length


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the device's peak FLOP/s for matrix multiplications; None if it is not known."""
    import torch

    peak = find(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return peak and peak.flops(precision, tf32=torch.get_float32_matmul_precision() != "highest")
