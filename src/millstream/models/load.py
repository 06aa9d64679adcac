"""From a model's files to a Decoder that can run."""

from __future__ import annotations

import torch

from millstream.hub.files import ModelFiles
from millstream.kernels.ops import Ops
from millstream.models.arch import FAMILIES, ModelArch
from millstream.models.decoder import Decoder
from millstream.models.names import gguf_names, hf_names
from millstream.parallel.stage import Stage, whole_model
from millstream.weights.loader import Progress, load_weights, open_checkpoint

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_decoder(
    files: ModelFiles,
    arch: ModelArch,
    ops: Ops,
    *,
    dtype: str,
    stage: Stage | None = None,
    max_len: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Decoder:
    """Build the Decoder of `arch` (or one stage of it) and load its weights as `dtype`, the type of `ops`.

    `progress` is called with bytes done and in all. Raises ModelError when the files do not fit the architecture.
    """
    decoder = Decoder(arch, stage or whole_model(arch.num_layers), ops, max_len=max_len, device=device)
    if files.kind == "gguf":
        names = gguf_names(arch, is_permuted=FAMILIES[arch.family].is_gguf_permuted)
    else:
        names = hf_names(arch)
    load_weights(
        decoder.slots,
        open_checkpoint(files),
        names,
        dtype=TORCH_DTYPES[dtype],
        device=device,
        progress=progress,
    )
    return decoder
