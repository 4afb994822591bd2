"""An unbiased codec that sends half of the bytes: either all even or all odd coordinates, chosen at random."""

import numpy as np
import torch

import fedstrata as fs


class Halves(fs.Codec):
    """Sends the even or the odd coordinates of each tensor, multiplied by two. The other coordinates become zero."""

    def forms(self, like):
        """Return the shapes and dtypes of the encoded tensors. Replies with other shapes or dtypes are refused."""
        return {n: {"v": ((t.numel() // 2,), torch.float32), "odd": ((), torch.bool)} for n, t in like.items()}

    def encode(self, change, generator: np.random.Generator):
        """Encode tensors. All random numbers come from ``generator``, so that runs are reproducible."""
        odd = bool(generator.random() < 0.5)
        flat = {name: tensor.reshape(-1)[: tensor.numel() // 2 * 2] for name, tensor in change.items()}
        return {name: {"v": 2 * tensor[odd::2], "odd": torch.tensor(odd)} for name, tensor in flat.items()}

    def decode(self, payload, like):
        """Return tensors in the shapes of ``like``."""
        found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        for name, parts in payload.items():
            found[name].view(-1)[int(parts["odd"]) : like[name].numel() // 2 * 2 : 2] = parts["v"]
        return found
