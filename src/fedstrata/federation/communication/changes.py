"""Changes of a model, on both sides: which tensors are encoded, and the model after some changes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from torch import Tensor

from fedstrata.base import records
from fedstrata.federation.communication.codecs import Codec, WithMemory, unpack
from fedstrata.federation.messages import Params


def parted(change: Params, codec: Codec, additive: Collection[str]) -> tuple[Params, Params]:
    """Return the tensors of a change that are encoded, and those that travel unencoded.

    With error feedback, the errors of several rounds are added up. Messages that must not be added up, such as
    prototypes, therefore travel unencoded.

    Args:
        change: The change of a client's answer.
        codec: The codec of the change.
        additive: Names of the objective's messages that may be added up over rounds.
    """
    unencoded = {name for name in change if isinstance(codec, WithMemory) and not _adds_up(name, additive)}
    encoded = {name: tensor for name, tensor in change.items() if name not in unencoded}
    return encoded, {name: change[name] for name in unencoded}


def _adds_up(name: str, additive: Collection[str]) -> bool:
    kind, _, rest = name.partition("/")
    return kind != "message" or rest.partition("/")[0] in additive


def renewed(params: Params, changes: list[Tensor], codec: Codec) -> Params:
    """Return a model after some encoded changes."""
    for change in changes:
        step = codec.decode(unpack(change, codec.forms(params)), params)
        params = {name: tensor + step[name] if name in step else tensor for name, tensor in params.items()}
    return params


def digest_of(before: bytes, after: Params | Tensor) -> bytes:
    """Return the digest of a model: from the digest ``before`` and an encoded change, or from a whole model.

    The digest depends on the bytes that were sent. Computed parameters may differ in the last bit between processors.
    """
    return hashlib.blake2b(before + records.encode(after), digest_size=16).digest()
