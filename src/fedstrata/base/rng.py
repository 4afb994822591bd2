"""Draw random numbers that depend only on the seed, the purpose, the round and the client.

Each use of random numbers has a named purpose and its own counter-based generator. Random numbers therefore stay the
same if you add a client, skip an evaluation or change the order of computations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

SERVER = -1
"""The value of the argument ``client`` for random numbers of the server."""


@dataclass
class Key(ISeedSequence):
    """The key of a generator: 128 bits, as two 64-bit integers with shape (2,).

    ``Philox(Key(words))`` draws the same numbers as ``Philox(key=words)``. With ``key=``, NumPy also reads random
    numbers from the operating system, but does not use them. ``Key`` avoids this step, so ``rng`` is three times as
    fast.
    """

    words: NDArray[np.uint64]

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> NDArray[np.uint64]:
        """Return the key, and ignore the arguments, because ``Philox`` always requests two words of 64 bits."""
        return self.words


def rng(seed: int, purpose: str, round: int = 0, client: int = SERVER) -> np.random.Generator:
    """Return a new random generator for one purpose.

    Args:
        seed: The experiment's seed.
        purpose: A name for this use of random numbers. Different names give independent numbers.
        round: The round, counted from 1; 0 before the first round.
        client: The client's id, or ``SERVER``.

    >>> a, b = rng(0, "batches", round=3, client=7), rng(0, "batches", round=3, client=7)
    >>> bool(a.random() == b.random())
    True
    >>> bool(rng(0, "batches", 3, 7).random() == rng(0, "batches", 3, 8).random())
    False
    """
    text = f"{seed}|{purpose}|{round}|{client}".encode()
    digest = hashlib.blake2b(text, digest_size=16, person=b"fedstrata").digest()
    key = Key(np.frombuffer(digest, dtype=np.uint64))
    return np.random.Generator(np.random.Philox(key))  # type: ignore[arg-type]  # the stub lacks ISeedSequence


def uniforms(seed: int, purpose: str, round: int, clients: NDArray[np.int64]) -> NDArray[np.float64]:
    """Draw a uniform number in [0, 1) for each client, independently of the other clients.

    This function is faster than calling ``rng(…, client).random()`` for each client, but does not return the same
    numbers. The computing time depends on the number of clients, and not on the largest id. Each number is a SplitMix64
    hash of the key and the client's id (Steele et al. 2014).

    Args:
        seed: The experiment's seed.
        purpose: A name for this use of random numbers, as in ``rng``.
        round: The round, counted from 1.
        clients: The clients' ids, in an array of any shape.

    Returns:
        The numbers, in the shape of ``clients``.
    """
    key, step = rng(seed, purpose, round).bit_generator.state["state"]["key"]
    with np.errstate(over="ignore"):
        z = key + (clients.astype(np.uint64) + np.uint64(1)) * (step | np.uint64(1))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        z ^= z >> np.uint64(31)
    result: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


@contextmanager
def torch_seeded(
    seed: int, purpose: str, round: int = 0, client: int = SERVER, device: torch.device | None = None
) -> Iterator[None]:
    """Seed PyTorch's global generators during the ``with`` block, and restore their states afterwards.

    Use this function for code that draws from a global generator, such as ``nn.Dropout`` and the initialisation of
    modules. If ``device`` is a GPU, the GPU's generator is seeded, too. In the block, the default dtype is float32,
    because another default dtype would change the random numbers.
    """
    cuda = device is not None and device.type == "cuda"
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    number = int(rng(seed, purpose, round, client).integers(2**63))
    with torch.random.fork_rng([device], device_type="cuda") if cuda else nullcontext():
        # Do not use torch.manual_seed. It is slow, because it formats a stack trace to seed devices other than the CPU.
        torch.default_generator.manual_seed(number)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(number)
        try:
            torch.set_default_dtype(torch.float32)
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_rng_state(state)
