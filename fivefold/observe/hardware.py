"""What an accelerator can do at most, and the share of it that training used."""

from __future__ import annotations

import re

# Dense peak of matrix multiplication in TFLOP/s at boost clock, without structured sparsity (vendors mostly print the
# sparse numbers, twice these). Columns:
#   bf16   with fp32 accumulation; fp16 is the same on all of these
#   tf32   float32 operands rounded to 19 bits (torch.set_float32_matmul_precision("high")); xf32 on AMD
#   fp32   full float32, torch's default
#   fp64   on tensor or matrix cores where there are any
# None: the device has no such units, or its peak is not published.
_PEAKS: dict[str, tuple[float | None, float | None, float | None, float | None]] = {
    # words of the name      bf16    tf32   fp32   fp64
    "b300":                 (2250.0, 1125.0, 75.0, 1.25),   # NVIDIA HGX B300 datasheet, an eighth of the board
    "b200":                 (2250.0, 1125.0, 75.0, 37.0),   # NVIDIA HGX B200 datasheet, an eighth of the board
    "gb200":                (2500.0, 1250.0, 80.0, 40.0),   # NVIDIA GB200 NVL72 datasheet, half a superchip
    "gh200":                (989.4, 494.7, 66.9, 66.9),     # the GPU is an H100 SXM: NVIDIA GH200 datasheet
    "h200":                 (989.4, 494.7, 66.9, 66.9),     # NVIDIA H200 datasheet, SXM
    "h200 nvl":             (835.5, 417.5, 60.0, 60.0),     # NVIDIA H200 datasheet, NVL
    "h100":                 (989.4, 494.7, 66.9, 66.9),     # NVIDIA H100 whitepaper, SXM5: "H100 80GB HBM3"
    "h100 pcie":            (756.0, 378.0, 51.2, 51.2),     # NVIDIA H100 whitepaper, PCIe
    "h100 nvl":             (835.5, 417.5, 60.0, 60.0),     # NVIDIA H100 datasheet, NVL
    "h800":                 (989.4, 494.7, 66.9, 1.0),      # NVIDIA H800 datasheet, SXM
    "h20":                  (148.0, 74.0, 44.0, 1.0),       # NVIDIA H20 datasheet
    "a100":                 (312.0, 156.0, 19.5, 19.5),     # NVIDIA A100 datasheet, SXM and PCIe alike
    "a800":                 (312.0, 156.0, 19.5, 19.5),     # NVIDIA A800 datasheet
    "a40":                  (149.7, 74.8, 37.4, 0.58),      # NVIDIA A40 datasheet
    "a30":                  (165.0, 82.0, 10.3, 10.3),      # NVIDIA A30 datasheet
    "a10":                  (125.0, 62.5, 31.2, 0.49),      # NVIDIA A10 datasheet
    "a10g":                 (70.0, 35.0, 35.0, None),       # NVIDIA A10G datasheet (AWS g5)
    "l40s":                 (362.1, 183.0, 91.6, 1.4),      # NVIDIA L40S datasheet
    "l40":                  (181.1, 90.5, 90.5, 1.4),       # NVIDIA L40 datasheet
    "l4":                   (121.0, 60.0, 30.3, 0.49),      # NVIDIA L4 datasheet
    "rtx 6000 ada":         (364.2, 182.1, 91.1, 1.4),      # NVIDIA Ada whitepaper
    "rtx a6000":            (154.8, 77.4, 38.7, 0.6),       # NVIDIA GA102 whitepaper
    "geforce rtx 5090":     (209.5, 104.8, 104.8, 1.64),    # NVIDIA RTX Blackwell whitepaper, fp32 accumulation
    "geforce rtx 4090":     (165.2, 82.6, 82.6, 1.29),      # NVIDIA Ada whitepaper, fp32 accumulation
    "geforce rtx 3090":     (71.0, 35.6, 35.6, 0.56),       # NVIDIA GA102 whitepaper, fp32 accumulation
    "mi355x":               (2516.6, None, 157.3, 78.6),    # AMD Instinct MI355X datasheet; CDNA 4 dropped xf32
    "mi325x":               (1307.4, 653.7, 163.4, 163.4),  # AMD Instinct MI325X datasheet
    "mi300x":               (1307.4, 653.7, 163.4, 163.4),  # AMD Instinct MI300X datasheet
    "mi250x":               (191.5, None, 47.9, 47.9),      # AMD Instinct MI250X datasheet; torch's device is a half
}  # fmt: skip
_COLUMNS = {"bfloat16": 0, "float16": 0, "tfloat32": 1, "float32": 2, "float64": 3}
# A word that makes another device of the same number: a slice, a laptop's, a smaller or larger one.
_OTHER = frozenset({"mig", "laptop", "mobile", "max", "d", "ti", "super"})


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak in FLOP/s of the device that torch names so, or None where it is not known.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it.
        dtype: bfloat16, float16, float32, float64, or tfloat32 for float32 with TF32 allowed.
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    fitting = [name for name in _PEAKS if words.issuperset(name.split())]
    if not fitting or words & _OTHER:
        return None
    tera = _PEAKS[max(fitting, key=lambda name: len(name.split()))][_COLUMNS[dtype]]
    return None if tera is None else tera * 1e12


def mfu(flops_per_token: float, tokens_per_s: float, ranks: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation: the share of all ranks' peak that the model's own arithmetic needs.

    Recomputed activations do not count. None where the peak is not known.

    Args:
        flops_per_token: of forward and backward, in FLOP.
        tokens_per_s: of the whole run.
        peak: of one rank, in FLOP/s.

    Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
    """
    return None if peak is None else flops_per_token * tokens_per_s / (ranks * peak)
