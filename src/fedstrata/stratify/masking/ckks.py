"""CKKS ciphertexts of packed vectors, on TenSEAL (extra ``he``).

Two sets of parameters, each at 128 bits of security. ``COUNTING`` only adds. ``COMPARING`` multiplies once by plain
numbers; products keep the squared scale instead of being rescaled, since rescaling divides by a prime that is not
quite the scale and would cost exactness.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrata.base.errors import ExtraMissingError, FedstrataError, ReplyRefusedError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Cipher = Any
"""An encrypted vector: TenSEAL's ``CKKSVector``."""

LARGEST = 1 << 20
"""No ciphertext is longer, in bytes."""


@dataclass(frozen=True)
class Parameters:
    """What CKKS needs to know.

    Args:
        degree: Of the polynomials; half of it is the number of slots.
        primes: Sizes of the modulus' primes, in bits; the last one is reserved for keys.
        scale: Binary logarithm of what numbers are multiplied by before they are rounded.
    """

    degree: int
    primes: tuple[int, ...]
    scale: int

    @property
    def slots(self) -> int:
        """Numbers in a ciphertext."""
        return self.degree // 2


COUNTING = Parameters(4096, (36, 36, 37), 28)
COMPARING = Parameters(8192, (54, 52, 52, 60), 52)


def tenseal() -> Any:
    """The module, imported when first needed.

    Raises:
        ExtraMissingError: It is not installed.
    """
    try:
        return importlib.import_module("tenseal")
    except ImportError:
        raise ExtraMissingError("masking of labels", "he") from None


def generate(parameters: Parameters) -> tuple[bytes, bytes]:
    """A new key pair from the operating system's randomness: the secret and the public context."""
    ts = tenseal()
    context = ts.context(ts.SCHEME_TYPE.CKKS, parameters.degree, -1, list(parameters.primes), n_threads=1)
    context.global_scale = 2.0**parameters.scale
    _exact(context)
    options = {"save_galois_keys": False, "save_relin_keys": False}
    return context.serialize(save_secret_key=True, **options), context.serialize(save_secret_key=False, **options)


def _exact(context: Any) -> None:
    """Never change a ciphertext's scale or level behind our back."""
    context.auto_rescale = context.auto_mod_switch = context.auto_relin = False


class Sealer:
    """The public side: encrypts, adds, multiplies, and cannot decrypt.

    Args:
        public: A serialised context.
        parameters: What it must have been made with.

    Raises:
        ReplyRefusedError: The bytes are no context, were made with other parameters, or hold a secret key.
    """

    def __init__(self, public: bytes, parameters: Parameters) -> None:
        self.parameters = parameters
        self.context = self._load_context(public)
        if self.context.is_private():
            raise ReplyRefusedError("a secret key arrived where only a public one may be")

    def _load_context(self, data: bytes) -> Any:
        try:
            context = tenseal().context_from(data, 1)
            _exact(context)
            probe = tenseal().ckks_vector(context, [0.0]).ciphertext()[0]
            made_with = probe.poly_modulus_degree(), probe.coeff_modulus_size(), probe.scale
        except (ValueError, RuntimeError, TypeError) as error:
            raise ReplyRefusedError(f"no CKKS context: {error}") from None
        wanted = self.parameters.degree, len(self.parameters.primes) - 1, 2.0**self.parameters.scale
        if made_with != wanted:
            raise ReplyRefusedError(f"a CKKS context with degree, primes, scale {made_with}, expected {wanted}")
        return context

    def seal(self, values: Floats | Sequence[float], *, product: bool = False) -> Cipher:
        """Encrypt one number a slot.

        Args:
            values: At most ``slots`` numbers.
            product: At the scale of a product, to be added to one.
        """
        numbers = np.asarray(values, dtype=np.float64).tolist()
        scale = 2.0 ** (self.parameters.scale * (2 if product else 1))
        return tenseal().ckks_vector(self.context, numbers, scale)

    def load(self, data: bytes, *, length: int, product: bool = False) -> Cipher:
        """A ciphertext that somebody sent.

        Args:
            data: Its bytes.
            length: How many numbers it must hold.
            product: Whether it must have the scale of a product.

        Raises:
            ReplyRefusedError: It is not one of ours.
        """
        if not 0 < len(data) <= LARGEST:
            raise ReplyRefusedError(f"a ciphertext of {len(data)} bytes")
        try:
            cipher = tenseal().ckks_vector_from(self.context, data)
            parts = cipher.ciphertext()
            size = cipher.size()
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            raise ReplyRefusedError(f"no ciphertext: {error}") from None
        if size != length or len(parts) != 1:
            raise ReplyRefusedError(f"a ciphertext of {size} numbers, expected {length}")
        part = parts[0]
        scale = 2.0 ** (self.parameters.scale * (2 if product else 1))
        levels = len(self.parameters.primes) - 1
        if (part.size(), part.coeff_modulus_size(), part.scale) != (2, levels, scale) or part.is_transparent():
            raise ReplyRefusedError("a ciphertext of another scale, level or size")
        return cipher


# Loading a context takes longer than everything else about a small federation: it is checked once, then used.
@lru_cache(maxsize=4)
def sealer(public: bytes, parameters: Parameters) -> Sealer:
    """The sealer of a public key; see ``Sealer``."""
    return Sealer(public, parameters)


class Opener(Sealer):
    """The clients' side: decrypts too.

    Args:
        secret: A serialised context with the secret key.
        parameters: What it must have been made with.
    """

    def __init__(self, secret: bytes, parameters: Parameters) -> None:
        self.parameters = parameters
        self.context = self._load_context(secret)
        if not self.context.is_private():
            raise FedstrataError("this context has no secret key")

    def open_whole(self, cipher: Cipher, *, tolerance: float) -> Ints:
        """Decrypt whole numbers.

        Args:
            cipher: What to decrypt.
            tolerance: Largest distance from a whole number, at most 0.25.

        Returns:
            int64, one a slot.

        Raises:
            FedstrataError: A number is farther from a whole one: never round what may be wrong.
        """
        values = np.array(cipher.decrypt(), dtype=np.float64)
        whole = np.rint(values)
        error = float(np.abs(values - whole).max(initial=0.0))
        # Beyond 2^50 doubles are so coarse that everything looks whole.
        if not error <= tolerance or not float(np.abs(values).max(initial=0.0)) < 2.0**50:
            raise FedstrataError(
                f"a decrypted number is {error:.3g} away from a whole one, at most {tolerance} is allowed: a "
                f"ciphertext is damaged or was made with another key"
            )
        return whole.astype(np.int64)
