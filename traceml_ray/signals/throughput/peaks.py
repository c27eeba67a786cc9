"""
What devices can do at most, in 10¹² FLOPs a second (dense, accumulated in float32), as their makers say.

Sources: the data sheets "NVIDIA H100 Tensor Core GPU", "H200 Tensor Core GPU", "A100 Tensor Core GPU", "A30",
"A10", "A40", "L4", "L40", "L40S", "RTX A6000", "V100", "T4", "HGX B200" and "GB200 NVL72"; the whitepapers
"NVIDIA Ampere GA102" (RTX 3090) and "Ada GPU architecture" (RTX 4090); AMD's of "Instinct MI250X", "MI300X"
and "MI325X". Where a sheet has figures with sparsity only, it is half of these.
"""

from __future__ import annotations

import re

_Peaks = dict[str, float]


def _tensor(half: float, tf32: float | None = None, fp8: float | None = None, fp32: float = 0) -> _Peaks:
    named = {"bfloat16": half, "float16": half, "tf32": tf32, "float8": fp8, "float32": fp32}
    return {name: value for name, value in named.items() if value}


_H100 = _tensor(989.4, 494.7, 1978.9, 66.9)
_H100_NVL = _tensor(835.5, 417.5, 1670.5, 60)
_MI300 = _tensor(1307.4, 653.7, 2614.9, 163.4)
PEAKS: dict[str, _Peaks] = {
    "GB200": _tensor(2500, 1250, 5000, 80),
    "B200": _tensor(2250, 1125, 4500, 75),
    "H200 NVL": _H100_NVL,
    "H200": _H100,
    "GH200": _H100,
    "H100 NVL": _H100_NVL,
    "H100 PCIe": _tensor(756, 378, 1513, 51),
    "H100": _H100,
    "A100": _tensor(312, 156, None, 19.5),
    "A30": _tensor(165, 82, None, 10.3),
    "A10": _tensor(125, 62.5, None, 31.2),
    "A40": _tensor(149.7, 74.8, None, 37.4),
    "RTX A6000": _tensor(154.8, 77.4, None, 38.7),
    "L40S": _tensor(362, 183, 733, 91.6),
    "L40": _tensor(181, 90.5, 362, 90.5),
    "L4": _tensor(121, 60, 242.5, 30.3),
    "RTX 4090": _tensor(165.2, 82.6, 330.3, 82.6),
    "RTX 3090": _tensor(71, 35.6, None, 35.6),
    "V100 PCIe": {"float16": 112, "float32": 14},
    "V100": {"float16": 125, "float32": 15.7},
    "T4": {"float16": 65, "float32": 8.1},
    "MI325X": _MI300,
    "MI300X": _MI300,
    "MI250X": _tensor(191.5, None, None, 47.9),  # of one of its two dies, each a device of its own
}
"""By name, a longer one before those that it contains; by type of data."""


_PARTS = {"MIG", "LAPTOP", "D", "GRID", "MAX"}
"""Words of names of what is a part of such a device, or a smaller one."""


def peak_tflops(device: str, dtype: str) -> float | None:
    """Return the peak of a device, by the name that torch has for it; None where that is not known."""
    words = re.split(r"[\s/-]+", device.upper())
    if _PARTS.intersection(words):
        return None
    name = next((name for name in PEAKS if f" {name.upper()} " in f" {' '.join(words)} "), None)
    return None if name is None else PEAKS[name].get("float8" if dtype.startswith("float8") else dtype)
