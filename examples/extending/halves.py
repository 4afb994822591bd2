"""A codec: every second coordinate, a coin says which, doubled: unbiased, and half the bytes."""

import numpy as np
import torch

import fedstrata as fs


class Halves(fs.Codec):
    """The even or the odd coordinates of every tensor, times two; zero for the others."""

    def forms(self, like):
        """Shapes and dtypes are known before anything is sent: what has others is refused."""
        return {n: {"v": ((t.numel() // 2,), torch.float32), "odd": ((), torch.bool)} for n, t in like.items()}

    def encode(self, change, generator: np.random.Generator):
        """Randomness comes from the generator, so that a run repeats to the bit."""
        odd = bool(generator.random() < 0.5)
        flat = {name: tensor.reshape(-1)[: tensor.numel() // 2 * 2] for name, tensor in change.items()}
        return {name: {"v": 2 * tensor[odd::2], "odd": torch.tensor(odd)} for name, tensor in flat.items()}

    def decode(self, payload, like):
        """In the shapes of what was sent."""
        found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        for name, parts in payload.items():
            found[name].view(-1)[int(parts["odd"]) : like[name].numel() // 2 * 2 : 2] = parts["v"]
        return found
