"""A model folder of transformers becomes OpenVINO's form, in the peer's own environment and without a network.

python -P openvino_model.py FOLDER TARGET 16|8|4
"""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig, OVWeightQuantizationConfig

GROUP = 32  # as Q4_1 has it


def main(folder: str, target: str, bits: str) -> None:
    weights = {
        "16": lambda: OVConfig(dtype="fp16"),
        "8": lambda: OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8)),
        "4": lambda: OVConfig(
            quantization_config=OVWeightQuantizationConfig(bits=4, sym=False, group_size=GROUP, ratio=1.0)
        ),
    }
    main_export(
        folder,
        output=target,
        task="text-generation-with-past",
        library_name="transformers",
        ov_config=weights[bits](),
        local_files_only=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
