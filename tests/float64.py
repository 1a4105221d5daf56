"""A mode in which a float64 model stays in float64, so that equality shows to 1e-12 and not to 1e-6.

Hugging Face's forwards cast norms, rotary embeddings, softmax, routing and recurrences up to float32, which for a
float64 model is down. Not for checkpointing: torch leaves function modes while it runs layers again in the backward.
"""

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Every cast to float32 becomes one to float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            return args[0].double()
        wide = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
        return function(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})
