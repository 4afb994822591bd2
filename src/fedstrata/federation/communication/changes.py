"""What both sides make of changes: which are encoded, and which model they lead to."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from torch import Tensor

from fedstrata.base import records
from fedstrata.federation.communication.codecs import Codec, WithMemory, unpack
from fedstrata.federation.messages import Params


def parted(change: Params, codec: Codec, additive: Collection[str]) -> tuple[Params, Params]:
    """What of a change goes through a codec, and what travels as it is.

    A message that does not add up, such as a prototype, has no place in a memory of what changes lost.

    Args:
        change: What a client answers.
        codec: How it travels.
        additive: Names of the objective's messages that add up as changes do.
    """
    kept = {name for name in change if isinstance(codec, WithMemory) and not _adds_up(name, additive)}
    encoded = {name: tensor for name, tensor in change.items() if name not in kept}
    return encoded, {name: change[name] for name in kept}


def _adds_up(name: str, additive: Collection[str]) -> bool:
    kind, _, rest = name.partition("/")
    return kind != "message" or rest.partition("/")[0] in additive


def renewed(params: Params, changes: list[Tensor], codec: Codec) -> Params:
    """A model after some encoded changes, each as it travels."""
    for change in changes:
        step = codec.decode(unpack(change, codec.forms(params)), params)
        params = {name: tensor + step[name] if name in step else tensor for name, tensor in params.items()}
    return params


def digest_of(before: bytes, after: Params | Tensor) -> bytes:
    """Names a model: that of a digest, after a change of it; or a whole one after nothing.

    It is of what was sent and not of what was computed from it, which differs in the last bit between processors.
    """
    return hashlib.blake2b(before + records.encode(after), digest_size=16).digest()
