"""Functions for server and clients: select the tensors to encode, apply changes to a model, and compute digests."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from torch import Tensor

from fedstrata.base import records
from fedstrata.federation.communication.codecs import Codec, WithMemory, unpack
from fedstrata.federation.messages import Params


def parted(change: Params, codec: Codec, additive: Collection[str]) -> tuple[Params, Params]:
    """Divide a client's update into the tensors to encode and the tensors to send without encoding.

    With error feedback, the objective's tensors that must not be added up over rounds, such as prototypes, are not
    encoded.

    Args:
        change: The update in a client's reply, including the tensors of the training objective.
        codec: The codec that encodes the update.
        additive: Names of the objective's tensor groups that may be added up over rounds.
    """
    unencoded = {name for name in change if isinstance(codec, WithMemory) and not _adds_up(name, additive)}
    encoded = {name: tensor for name, tensor in change.items() if name not in unencoded}
    return encoded, {name: change[name] for name in unencoded}


def _adds_up(name: str, additive: Collection[str]) -> bool:
    kind, _, rest = name.partition("/")
    return kind != "message" or rest.partition("/")[0] in additive


def renewed(params: Params, changes: list[Tensor], codec: Codec) -> Params:
    """Apply encoded changes to a model's parameters, and return the new parameters.

    Args:
        params: The parameters before the changes.
        changes: The changes, encoded and packed, oldest first.
        codec: The codec of the changes.
    """
    for change in changes:
        step = codec.decode(unpack(change, codec.forms(params)), params)
        params = {name: tensor + step[name] if name in step else tensor for name, tensor in params.items()}
    return params


def digest_of(before: bytes, after: Params | Tensor) -> bytes:
    """Return the digest (hash) that identifies a version of the model.

    The digest is computed from the transmitted bytes, because the last bits of parameters may differ between
    processors.

    Args:
        before: The digest of the previous version; empty if ``after`` is the whole model.
        after: The encoded change from the previous version, or the parameters of the whole model.
    """
    return hashlib.blake2b(before + records.encode(after), digest_size=16).digest()
