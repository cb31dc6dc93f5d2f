"""Reading weights through transformers so that nothing is made up: a weight that is missing is an error.

Code that comes with a model is never run, pickles are never opened, and the network is never asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktransformer2.errors import ModelError, ModelFileError
from ktransformer2.models.registry import quiet_transformers


def read_weights(folder: Path, dtype: torch.dtype, **settings: Any) -> PreTrainedModel:
    """A causal model out of a folder, in `dtype`. `settings` go to `from_pretrained`.

    Raises ModelError for a package that is missing, ModelFileError for everything that is wrong with the files.
    """
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **settings,
            )
    except ImportError as error:
        raise ModelError(f"{folder}: a package is missing: {error}") from error
    except Exception as error:  # transformers raises whatever the files make it stumble over
        raise ModelFileError(f"{folder}: cannot be loaded ({type(error).__name__}: {error})") from error
    model, report = loaded
    wrong = sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"])))
    if wrong:
        raise ModelFileError(
            f"{folder}: {len(wrong)} weights are missing or have another shape: {', '.join(wrong[:3])}"
        )
    found: PreTrainedModel = model
    return found
