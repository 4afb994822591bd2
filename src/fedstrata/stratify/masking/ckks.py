"""Encrypt vectors with the homomorphic encryption scheme CKKS, which TenSEAL (extra ``he``) implements.

CKKS can add and multiply encrypted numbers. This module has two sets of parameters, each with 128 bits of security.
Ciphertexts with the parameters ``COUNTING`` can only be added. Ciphertexts with the parameters ``COMPARING`` can also
be multiplied once by plain numbers. Numbers are multiplied by a scale before encryption, so products have a squared
scale. Products are not *rescaled*, because rescaling divides them by a prime that differs slightly from the scale.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import ExtraMissingError, FedstrataError, ReplyRefusedError

Cipher = Any
"""An encrypted vector: TenSEAL's ``CKKSVector``."""

LARGEST = 1 << 20
"""The maximum size of a ciphertext in bytes."""


@dataclass(frozen=True)
class Parameters:
    """The parameters of CKKS.

    Args:
        degree: The degree of the polynomials: twice the number of slots.
        primes: The sizes of the primes in bits. The product of these primes is the modulus, and the last prime is
            reserved for keys.
        scale: The binary logarithm of the scale. Numbers are multiplied by the scale before they are rounded and
            encrypted.
    """

    degree: int
    primes: tuple[int, ...]
    scale: int

    @property
    def slots(self) -> int:
        """The number of slots of a ciphertext. Each slot contains one number."""
        return self.degree // 2


COUNTING = Parameters(4096, (36, 36, 37), 28)
COMPARING = Parameters(8192, (54, 52, 52, 60), 52)


def tenseal() -> Any:
    """Import TenSEAL on first use.

    Raises:
        ExtraMissingError: TenSEAL is not installed.
    """
    try:
        return importlib.import_module("tenseal")
    except ImportError:
        raise ExtraMissingError("masking of labels", "he") from None


def generate(parameters: Parameters) -> tuple[bytes, bytes]:
    """Generate keys with the operating system's random numbers. Return the secret and the public context, as bytes."""
    ts = tenseal()
    context = ts.context(ts.SCHEME_TYPE.CKKS, parameters.degree, -1, list(parameters.primes), n_threads=1)
    context.global_scale = 2.0**parameters.scale
    _exact(context)
    options = {"save_galois_keys": False, "save_relin_keys": False}
    return context.serialize(save_secret_key=True, **options), context.serialize(save_secret_key=False, **options)


def _exact(context: Any) -> None:
    """Turn off all automatic operations that would change a ciphertext's scale or modulus."""
    context.auto_rescale = context.auto_mod_switch = context.auto_relin = False


class Sealer:
    """Uses a public key to encrypt numbers, and to add and multiply ciphertexts. Public keys cannot decrypt.

    Args:
        public: A serialised context without the secret key.
        parameters: The expected parameters.

    Raises:
        ReplyRefusedError: The bytes are not a context, or the context has wrong parameters or contains a secret key.
    """

    def __init__(self, public: bytes, parameters: Parameters) -> None:
        self.parameters = parameters
        self.context = self._load_context(public)
        if self.context.is_private():
            raise ReplyRefusedError("the CKKS context contains a secret key, but only a public key may be sent")

    def _load_context(self, data: bytes) -> Any:
        try:
            context = tenseal().context_from(data, 1)
            _exact(context)
            probe = tenseal().ckks_vector(context, [0.0]).ciphertext()[0]
            made_with = probe.poly_modulus_degree(), probe.coeff_modulus_size(), probe.scale
        except (ValueError, RuntimeError, TypeError) as error:
            raise ReplyRefusedError(f"the CKKS context cannot be read: {error}") from None
        wanted = self.parameters.degree, len(self.parameters.primes) - 1, 2.0**self.parameters.scale
        if made_with != wanted:
            raise ReplyRefusedError(
                f"the degree, the number of primes and the scale of the CKKS context are {made_with}, but must be "
                f"{wanted}"
            )
        return context

    def seal(self, values: Floats | Sequence[float], *, product: bool = False) -> Cipher:
        """Encrypt one number per slot.

        Args:
            values: At most ``Parameters.slots`` numbers.
            product: Whether to square the scale, as in products. The ciphertext can then be added to a product.
        """
        numbers = np.asarray(values, dtype=np.float64).tolist()
        scale = 2.0 ** (self.parameters.scale * (2 if product else 1))
        return tenseal().ckks_vector(self.context, numbers, scale)

    def load(self, data: bytes, *, length: int, product: bool = False) -> Cipher:
        """Load a ciphertext that another party sent.

        Args:
            data: The bytes.
            length: The expected number of slots.
            product: Whether the ciphertext must have the scale of a product.

        Raises:
            ReplyRefusedError: The bytes are not a ciphertext, or the ciphertext's size, scale or level is wrong.
        """
        if not 0 < len(data) <= LARGEST:
            raise ReplyRefusedError(f"the ciphertext has {len(data)} bytes, but must have 1 to {LARGEST}")
        try:
            cipher = tenseal().ckks_vector_from(self.context, data)
            parts = cipher.ciphertext()
            size = cipher.size()
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            raise ReplyRefusedError(f"the ciphertext cannot be read: {error}") from None
        if size != length or len(parts) != 1:
            raise ReplyRefusedError(f"the ciphertext has {size} numbers, but must have {length}")
        part = parts[0]
        scale = 2.0 ** (self.parameters.scale * (2 if product else 1))
        levels = len(self.parameters.primes) - 1
        if (part.size(), part.coeff_modulus_size(), part.scale) != (2, levels, scale) or part.is_transparent():
            raise ReplyRefusedError("the ciphertext has the wrong scale, level or size")
        return cipher


# Keep the last objects in a cache, because loading and checking a CKKS context takes most of the time in a small
# federation.
@lru_cache(maxsize=4)
def sealer(public: bytes, parameters: Parameters) -> Sealer:
    """Return the ``Sealer`` of a public key, from a cache if possible."""
    return Sealer(public, parameters)


class Opener(Sealer):
    """Encrypts and decrypts with a secret key. Only clients have secret keys.

    Args:
        secret: A serialised context with the secret key.
        parameters: The expected parameters.
    """

    def __init__(self, secret: bytes, parameters: Parameters) -> None:
        self.parameters = parameters
        self.context = self._load_context(secret)
        if not self.context.is_private():
            raise FedstrataError("the CKKS context does not contain a secret key, which is needed to decrypt")

    def open_whole(self, cipher: Cipher, *, tolerance: float) -> Ints:
        """Decrypt a ciphertext of integers.

        Args:
            cipher: The ciphertext.
            tolerance: The maximum accepted distance between a decrypted number and the nearest integer, at most 0.25.

        Returns:
            The integers, one per slot, with the dtype int64.

        Raises:
            FedstrataError: A decrypted number differs from the nearest integer by more than ``tolerance``, so rounding
                could give a wrong integer.
        """
        values = np.array(cipher.decrypt(), dtype=np.float64)
        whole = np.rint(values)
        error = float(np.abs(values - whole).max(initial=0.0))
        # Beyond 2^50, doubles are so coarse that all numbers look like integers.
        if not error <= tolerance or not float(np.abs(values).max(initial=0.0)) < 2.0**50:
            raise FedstrataError(
                f"a decrypted number is {error:.3g} away from an integer, but at most {tolerance} is allowed. A "
                "ciphertext is damaged, or was encrypted with another key."
            )
        return whole.astype(np.int64)
