"""Peak arithmetic rates of GPUs, against which MFU is measured.

The figures are dense (without structured sparsity), for matrix multiplications that accumulate in
fp32. GeForce boards multiply fp16 with fp32 accumulation at half the rate that NVIDIA advertises.
For a device that is not in the table no MFU is reported: a wrong MFU is worse than none.
"""

from __future__ import annotations

import re
from itertools import starmap
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


# Numbers of cores and boost clocks in GHz of GeForce RTX 30, 40 and 50, from nvidia.com. Without
# cards whose name stands for several numbers of cores, such as RTX 3050 and 3080.
GEFORCE = (
    ("3060", 3584, 1.78),
    ("3060 Ti", 4864, 1.67),
    ("3070", 5888, 1.73),
    ("3070 Ti", 6144, 1.77),
    ("3080 Ti", 10240, 1.67),
    ("4060", 3072, 2.46),
    ("4060 Ti", 4352, 2.54),
    ("4070", 5888, 2.48),
    ("4070 SUPER", 7168, 2.48),
    ("4070 Ti", 7680, 2.61),
    ("4070 Ti SUPER", 8448, 2.61),
    ("4080", 9728, 2.51),
    ("4080 SUPER", 10240, 2.55),
    ("5060", 3840, 2.5),
    ("5060 Ti", 4608, 2.57),
    ("5070", 6144, 2.51),
    ("5070 Ti", 8960, 2.45),
    ("5080", 10752, 2.62),
)


def _geforce(name: str, cores: int, ghz: float) -> Peak:
    """Return the entry of a GeForce RTX 30, 40 or 50.

    A core multiplies and adds once in a cycle; the matrix units are as fast in TF32, and twice as
    fast in fp16 with fp32 accumulation (whitepapers of GA102, Ada and RTX Blackwell).
    """
    fp32 = 2 * cores * ghz / 1000
    return Peak(f"GeForce RTX {name}", 2 * fp32, fp32, fp32, "nvidia.com: cores, boost clock")


PEAKS = (
    Peak("GB200", 2500, 1250, 80, "GB200 NVL72 datasheet, a 72nd, half of the sparse figures"),
    Peak(
        "B300( SXM6 AC)?", 2250, 1125, 75, "HGX B300 datasheet, an eighth, half of the sparse ones"
    ),
    Peak("B200", 2250, 1125, 75, "HGX B200 (Blackwell datasheet)"),
    Peak("H20", 148, 74, 44, "H20 datasheet"),
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
    Peak("A2", 18, 9, 4.5, "A2 datasheet"),
    # Workstation cards multiply fp16 and bf16 at the full rate: half of the sparse figure, for Ada
    # a fourth of that of fp8, for Blackwell an eighth of that of fp4. TF32 is half of it.
    Peak(
        "RTX PRO 6000 Blackwell Workstation Edition", 500, 250, 125, "RTX PRO 6000 datasheet: 4,000"
    ),
    Peak("RTX PRO 6000 Blackwell Max Q Workstation Edition", 438.9, 219.4, 110, "datasheet: 3,511"),
    Peak("RTX 5000 Ada Generation", 1044.4 / 4, 1044.4 / 8, 65.3, "RTX 5000 Ada datasheet"),
    Peak("RTX 4500 Ada Generation", 634 / 4, 634 / 8, 39.6, "RTX 4500 Ada datasheet"),
    Peak("RTX 4000 Ada Generation", 427.6 / 4, 427.6 / 8, 26.7, "RTX 4000 Ada datasheet"),
    Peak("RTX 4000 SFF Ada Generation", 306.8 / 4, 306.8 / 8, 19.2, "RTX 4000 SFF Ada datasheet"),
    Peak("RTX 2000 Ada Generation", 191.9 / 4, 191.9 / 8, 12, "RTX 2000 Ada datasheet"),
    Peak("RTX A5500", 272.8 / 2, 272.8 / 4, 34.1, "RTX A5500 datasheet"),
    Peak("RTX A5000", 222.2 / 2, 222.2 / 4, 27.8, "RTX A5000 datasheet"),
    Peak("RTX A4500", 189.2 / 2, 189.2 / 4, 23.7, "RTX A4500 datasheet"),
    Peak("RTX A4000", 153.4 / 2, 153.4 / 4, 19.2, "RTX A4000 datasheet"),
    Peak("RTX A2000( 12GB)?", 63.9 / 2, 63.9 / 4, 8, "RTX A2000 datasheet"),
    Peak("RTX A6000", 154.8, 77.4, 38.7, "GA102 architecture whitepaper"),
    Peak("RTX 6000 Ada Generation", 364.2, 182.1, 91.1, "RTX 6000 Ada datasheet"),
    *starmap(_geforce, GEFORCE),
    Peak("GeForce RTX 3090", 71, 35.6, 35.6, "GA102 architecture whitepaper"),
    Peak("GeForce RTX 3090 Ti", 80, 40, 40, "Ada architecture whitepaper, comparison"),
    Peak("GeForce RTX 4090", 165.2, 82.6, 82.6, "Ada architecture whitepaper"),
    Peak("GeForce RTX 5090", 209.5, 104.8, 104.8, "RTX Blackwell architecture whitepaper"),
    Peak("TITAN RTX", 130.5, None, 16.3, "TITAN RTX datasheet", bf16=False),
    Peak("GeForce RTX 2070", 29.9, None, 7.5, "Turing architecture whitepaper", bf16=False),
    Peak("GeForce RTX 2080", 40.3, None, 10.1, "Turing architecture whitepaper", bf16=False),
    Peak("Quadro RTX 5000", 89.2, None, 11.2, "Turing architecture whitepaper", bf16=False),
    Peak("Quadro RTX 4000", 57, None, 7.1, "Quadro RTX 4000 datasheet", bf16=False),
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
