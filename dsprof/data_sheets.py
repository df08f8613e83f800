"""What devices can compute at most, by their makers' data sheets: dense matrix products (without sparsity), in the
number format of the inputs, accumulated in float32; how much their memory holds and moves; and their link.

TFLOP/s, TB/s, GiB, GB/s. A device that is not listed, a slice of one (MIG), or a format that it lacks has no peak here.
Standard library only: the engine chooses by it what it computes in, and the analyzer says how well devices are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Device:
    """name: as people say it. pattern: what its driver calls it, whole. tflops: format -> peak; `tf32` is float32 on
    tensor cores, which torch uses where `torch.set_float32_matmul_precision` allows it; `float8` both its formats.
    source: where the peaks are written. tb_a_second: of its memory. memory_gib: of the largest variant, which sheets
    give in GB. link_gb_s: to the other devices of its node, one way (half of what is given for both): NVLink, of the
    NVL cards over their bridges; else the PCI bus, also where pairs of cards can be bridged. None of these three: not
    known. memory_source: where these three are written. The makers' pages could not be opened when they were looked
    up, so it names public listings that repeat them, and says what is FROM_MEMORY, and so checked against nothing:
    `unchecked` names these fields, and plans take them to be known less."""

    name: str
    pattern: str
    tflops: Mapping[str, float]
    source: str
    tb_a_second: float | None = None
    memory_gib: float | None = None
    link_gb_s: float | None = None
    memory_source: str = ""
    unchecked: tuple[str, ...] = ()

    def flops(self, dtype: str, tf32: bool) -> float | None:
        """Operations a second in torch's `dtype`; None where the sheet does not say."""
        key = "tf32" if dtype == "float32" and tf32 and "tf32" in self.tflops else dtype
        key = "float8" if key.startswith("float8") else key
        peak = self.tflops.get(key)
        return None if peak is None else peak * 1e12


def _formats(
    half: float, tf32: float | None, single: float, double: float | None = None, float8: float | None = None
) -> dict[str, float]:
    found = {"bfloat16": half, "float16": half, "float32": single}
    more = {"tf32": tf32, "float64": double, "float8": float8}
    return found | {name: peak for name, peak in more.items() if peak}


FROM_MEMORY: Final = "from memory"
A100_SHEET: Final = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-"
    "web.pdf"
)
A100_LISTED: Final = (
    "https://glennklockwood.com/garden/processors/A100, which cites that sheet; of PCIe cards the memory by "
    "https://www.thundercompute.com/blog/nvidia-a100-specs-full-guide"
)
H200_LISTED: Final = "https://openmetal.io/resources/blog/how-the-h200-is-built-for-memory-bound-ai-workloads/"
PCIE_4: Final = (
    "https://wccftech.com/nvidia-ad102-gpus-powering-next-gen-geforce-rtx-40-series-will-stick-with-pcie-gen-4-0-"
    "protocol/"
)
DEVICES: Final = (
    Device(
        "B200",
        r"NVIDIA B200",
        _formats(2250, 1125, 75, float8=4500),
        "https://www.nvidia.com/en-us/data-center/hgx/ (HGX B200, an eighth; half of what is given with sparsity)",
        tb_a_second=8.0,
        memory_gib=180,
        link_gb_s=900,
        memory_source="https://www.server-parts.eu/post/nvidia-b200-gb200-blackwell-gpu-server-comparison (an eighth); "
        "link: https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview",
    ),
    Device(
        "H200 SXM",
        r"NVIDIA H200",
        _formats(989.5, 494.5, 67, 67, float8=1979),
        "https://www.nvidia.com/en-us/data-center/h200/ (half of what is given with sparsity)",
        tb_a_second=4.8,
        memory_gib=141,
        link_gb_s=450,
        memory_source=H200_LISTED,
    ),
    Device(
        "H200 NVL",
        r"NVIDIA H200 NVL",
        _formats(835.5, 417.5, 60, 60, float8=1671),
        "https://www.nvidia.com/en-us/data-center/h200/ (half of what is given with sparsity)",
        tb_a_second=4.8,
        memory_gib=141,
        link_gb_s=450,
        memory_source=f"{H200_LISTED}; link: {FROM_MEMORY}",
        unchecked=("link_gb_s",),
    ),
    Device(
        "H100 SXM",
        r"NVIDIA H100 80GB HBM3",
        _formats(989.5, 494.5, 67, 67, float8=1979),
        "https://www.nvidia.com/en-us/data-center/h100/ (half of what is given with sparsity)",
        tb_a_second=3.35,
        memory_gib=80,
        link_gb_s=450,
        memory_source=f"{H200_LISTED}; link: https://github.com/NVIDIA/nccl/issues/1264",
    ),
    Device(
        "H100 NVL",
        r"NVIDIA H100 NVL",
        _formats(835.5, 417.5, 60, 60, float8=1671),
        "https://www.nvidia.com/en-us/data-center/h100/ (half of what is given with sparsity)",
        tb_a_second=3.9,
        memory_gib=94,
        link_gb_s=300,
        memory_source="https://www.aiminingco.com/gpu/h100-nvl/specs",
    ),
    Device(
        "H100 PCIe",
        r"NVIDIA H100 PCIe",
        _formats(756, 378, 51, 51, float8=1513),
        "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper (table of H100 PCIe, dense)",
        tb_a_second=2.0,
        memory_gib=80,
        link_gb_s=64,
        memory_source="https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html (a table of both cards); its "
        "rate: NVIDIA's product brief PB-11133-001_v02, too",
    ),
    # Of A100, each memory has its own rate; the link of a PCIe card is the bus.
    *(
        Device("A100", pattern, _formats(312, 156, 19.5, 19.5), A100_SHEET, moves, holds, link, A100_LISTED)
        for pattern, moves, holds, link in (
            (r"(NVIDIA )?A100-(SXM4|PG509)-80GB", 2.039, 80, 300),
            (r"(NVIDIA )?A100-(SXM4|PG509)-40GB", 1.555, 40, 300),
            (r"(NVIDIA )?A100-PCIE-80GB|NVIDIA A100 80GB PCIe", 1.935, 80, 32),
            (r"(NVIDIA )?A100-PCIE-40GB", 1.555, 40, 32),
            (r"NVIDIA A100-SXM-64GB", None, 64, None),  # by its name
        )
    ),
    Device(
        "L40S",
        r"NVIDIA L40S",
        _formats(362.05, 183, 91.6, float8=733),
        "https://www.nvidia.com/en-us/data-center/l40s/",
        tb_a_second=0.864,
        memory_gib=48,
        link_gb_s=32,
        memory_source="https://www.mullet.se/product.html?product_id=355414 (table of L40 and L40S)",
    ),
    Device(
        "V100 SXM2",
        r"(NVIDIA )?(Tesla )?V100-SXM2-(16|32)GB",
        {"float16": 125, "float32": 15.7, "float64": 7.8},
        "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
        tb_a_second=0.9,
        memory_gib=32,
        link_gb_s=150,
        memory_source="http://www.manualshelf.com/manual/dell/high-performance-computing-solution-resources/reference-guide-english/"
        "page-17.html; size: by its name",
    ),
    Device(
        "V100 PCIe",
        r"(NVIDIA )?(Tesla )?V100-PCIE-(16|32)GB",
        {"float16": 112, "float32": 14, "float64": 7},
        "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
        tb_a_second=0.9,
        memory_gib=32,
        link_gb_s=16,
        memory_source=f"link: as of V100 SXM2; size: by its name; rate: {FROM_MEMORY}",
        unchecked=("tb_a_second",),
    ),
    Device(
        "RTX 4090",
        r"NVIDIA GeForce RTX 4090",
        _formats(165.2, 82.6, 82.6, float8=330.3),
        "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf (appendix A, with "
        "FP32 accumulate)",
        tb_a_second=1.008,
        memory_gib=24,
        link_gb_s=32,
        memory_source="https://www.thefpsreview.com/gpu-family/nvidia-geforce-rtx-4090-gpu-family-specifications; "
        f"link: {PCIE_4}",
    ),
    Device(
        "RTX 3090",
        r"NVIDIA GeForce RTX 3090",
        _formats(71, 35.6, 35.6),
        "https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-"
        "Whitepaper-V1.pdf (with FP32 accumulate)",
        tb_a_second=0.936,
        memory_gib=24,
        link_gb_s=32,
        memory_source=f"http://szpamela.com/?list_8/51.html; link, which is PCIe 4.0, too: {PCIE_4}",
    ),
)


def find_device(name: str) -> Device | None:
    """The device that torch calls `name`; None: not listed."""
    return next((device for device in DEVICES if re.fullmatch(device.pattern, name)), None)
