"""Secure sums of updates that ``PowerSGD`` compresses: one sum for each of the two factors of P Qᵀ.

The server computes P from the first sum, Σ M_k Q, where M_k is the update of client k. The second sum is Σ w_k M_kᵀ P,
where w_k is the weight of client k.

The two sums must contain the updates of the same clients. If only one of the sums contained client k, the server could
compute Pᵀ M_k Q from the difference. A server that chooses P and Q could then read elements of the client's update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstrata.base.errors import SpecError
from fedstrata.federation.communication.codecs import Codec, Payload, PowerSGD, unpack, with_frame
from fedstrata.federation.communication.messages import Coefficients, Encoded, EncodedReply
from fedstrata.federation.messages import ClientId, Params, Reply, Weights
from fedstrata.federation.secure.fit import Count, Form, Forms, ModelForm, Numbers, Summands, Update, Weight
from fedstrata.federation.secure.ring import Total, Words, rounding

_NO_MODEL = Weights({}, {})


class FirstForm(ModelForm):
    """The form (layout) of a client's term of the first sum, M_k Q.

    Each column of Q has a norm of at most 1. An element of M_k Q is therefore at most √columns times as large as the
    largest element of M_k.

    Args:
        whole: The layout of uncompressed replies.
        codec: The codec.
    """

    def __init__(self, whole: ModelForm, codec: PowerSGD) -> None:
        _, update = update_of(whole)
        like = update_like(whole)
        self._forms = codec.forms_of_frame(like)
        summands: Summands = {}
        for name, parts in self._forms.items():
            shape, _ = parts["p"]
            wide = update.range * math.sqrt(like[name].numel() / shape[0])
            summands[name] = Numbers(_entry(name, "p"), {name: torch.zeros(shape)}, wide)
        super().__init__(whole.config, whole.ring.sites, summands)

    def encode(self, request: Encoded, reply: EncodedReply, client: ClientId) -> Words:
        """Return the vector of integers that a client adds to the secure sum."""
        payload = unpack(reply.payload, self._forms)
        return self.words(_NO_MODEL, payload, rounding(self.config.seed, request.round, client, 2 * request.exchange))

    def payload(self, total: Total) -> Payload:
        """Return Σ M_k Q for each matrix, in float64."""
        return {
            name: {"p": torch.from_numpy(total.parts[name]).reshape(parts["p"][0])}
            for name, parts in self._forms.items()
        }


@dataclass(frozen=True)
class _Term:
    """A client's term of the second sum: its factors M_kᵀ P, and its reply without the update."""

    payload: Payload
    reply: Reply


class SecondForm(ModelForm):
    """The layout of replies for the second sum: the client's term w_k M_kᵀ P, and all other numbers.

    The columns of P are orthonormal. An element of M_kᵀ P is therefore at most √rows times as large as the largest
    element of M_k.

    Args:
        whole: The layout of uncompressed replies.
        codec: The codec.
    """

    def __init__(self, whole: ModelForm, codec: PowerSGD) -> None:
        self._whole, self._codec = whole, codec
        self._name, self._update = update_of(whole)
        self.like = update_like(whole)
        self._forms = codec.forms_of_coefficients(self.like)
        weight = _of_reply(self._update.weight)
        summands: Summands = {}
        for name, parts in self._forms.items():
            for part, (shape, _) in parts.items():
                wide = self._update.range * (math.sqrt(self.like[name].shape[0]) if part else 1.0)
                summands[_factor(name)] = Numbers(_entry(name, part), {name: torch.zeros(shape)}, wide, weight)
        for name, other in whole.summands.items():
            if isinstance(other, Count):
                summands[name] = Count(_value_of(other), other.most)
            elif name != self._name:
                summands[name] = Numbers(_values_of(other), other.like, other.range, _of_reply(other.weight))
        super().__init__(whole.config, whole.ring.sites, summands)

    def encode(self, request: Coefficients, reply: EncodedReply, client: ClientId) -> Words:
        """Return the vector of integers that a client adds to the secure sum."""
        # The request does not contain its round, so use round 0. The generator still differs between exchanges, because
        # no other exchange of the run has the number ``request.exchange``.
        generator = rounding(self.config.seed, 0, client, 2 * request.exchange + 1)
        return self.words(_NO_MODEL, self._term(reply), generator)

    def sent(self, words: Words, reply: EncodedReply) -> Payload:
        """Return the rounded factors that a client's vector contains.

        If the client's weight is 0, these factors are only zeros. Then return the factors in the client's reply.
        """
        assert reply.reply is not None
        weight = self._update.weight.of(reply.reply)
        if not weight:
            return unpack(reply.payload, self._forms)
        summed = self.payload(self.ring.decode(words, 1))
        return {
            name: {part: (tensor / weight).float() for part, tensor in parts.items()} for name, parts in summed.items()
        }

    def payload(self, total: Total) -> Payload:
        """Return Σ w_k M_kᵀ P for each matrix and Σ w_k x_k for each other tensor x_k, in float64."""
        largest = self._update.weight.largest
        return {
            name: {part: torch.from_numpy(total.parts[_factor(name)] * largest).reshape(shape)}
            for name, parts in self._forms.items()
            for part, (shape, _) in parts.items()
        }

    def decoded(self, first: Total, second: Total, frame: Payload) -> Total:
        """Decode the update from both sums, and return the total in the layout of uncompressed replies.

        Args:
            first: The first sum.
            second: The second sum.
            frame: The factors P.
        """
        changes = self._codec.decode(with_frame(self.payload(second), frame), self.like)
        row = torch.cat([changes[name].reshape(-1) for name in self.like]).double().numpy()
        numbers = self._whole.summands[self._name]
        assert isinstance(numbers, Numbers)
        others = {name: part for name, part in second.parts.items() if name in self._whole.summands}
        parts = {self._name: row / numbers.weight.largest} | others
        return Total(parts, second.counts, first.scaled + second.scaled)

    def _term(self, reply: EncodedReply) -> _Term:
        assert reply.reply is not None
        return _Term(unpack(reply.payload, self._forms), reply.reply)


def with_codec(forms: Forms, up: Codec) -> Forms:
    """Return the layouts of encoded and plain replies to all requests.

    Args:
        forms: The layouts of replies without a codec.
        up: The codec of the clients' updates.

    Raises:
        SpecError: Secure sums of these updates are not possible with this codec.
    """
    if not isinstance(up, PowerSGD):
        return forms
    (whole,) = {id(form): form for form in forms.values() if isinstance(form, ModelForm)}.values()
    both: dict[Any, Form] = {Encoded: FirstForm(whole, up), Coefficients: SecondForm(whole, up)}
    return {**forms, **both}


def update_of(form: ModelForm) -> tuple[str, Update]:
    """Return the name and the description of the updates that a sum with the layout ``form`` contains.

    The updates must be the only numbers in ``form`` that depend on the clients' models.

    Raises:
        SpecError: Numbers other than the updates also depend on the clients' models.
    """
    others = [n for n, each in form.summands.items() if isinstance(each, Numbers) and each.needs_model]
    name = others[0]
    numbers = form.summands[name]
    assert isinstance(numbers, Numbers)
    if len(others) > 1 or numbers.update is None or numbers.like.keys() != form.config.model.params().keys():
        problem = (
            "with secure sums, a codec requires that each client sends only one update, which covers all parameters"
        )
        raise SpecError("communication.up", f"{problem}. Use 'none', or another method or model.", "powersgd")
    return name, numbers.update


def update_like(form: ModelForm) -> Params:
    """Return tensors with the names, shapes and dtypes of the clients' updates."""
    name, update = update_of(form)
    numbers = form.summands[name]
    assert isinstance(numbers, Numbers)
    return {update.prefix + key: tensor for key, tensor in numbers.like.items()}


def _factor(name: str) -> str:
    return f"factor {name}"


def _entry(name: str, part: str) -> Any:
    """Return a function that returns one tensor of a payload."""

    def values(sent: Weights, term: Any) -> Params:
        payload: Mapping[str, Mapping[str, Tensor]] = term.payload if isinstance(term, _Term) else term
        return {name: payload[name][part]}

    return values


def _values_of(numbers: Numbers) -> Any:
    return lambda sent, term: numbers.values(sent, term.reply)


def _value_of(count: Count) -> Any:
    return lambda term: count.value(term.reply)


def _of_reply(weight: Weight) -> Weight:
    return Weight(weight.name, lambda term: weight.of(term.reply), weight.largest)
