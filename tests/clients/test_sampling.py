from __future__ import annotations

import numpy as np

from fedstrata.objectives.fedbabu import BodyOnly
from fedstrata.sampling.messages import Sketch


def test_an_introduction_trains_what_the_objective_trains(tiny):
    """It trained the head that FedBABU freezes, so that clusters told who had taken part."""
    federation = tiny(2, objective=BodyOnly())
    (reply,) = federation.ask([0], Sketch(1, federation.weights, 0)).values()
    names = list(federation.weights.params)
    ends = np.cumsum([w.numel() for w in federation.weights.params.values()])
    parts = dict(zip(names, np.split(reply.values.numpy(), ends[:-1]), strict=True))
    head = federation.config.model.head_names
    for name, start in federation.weights.params.items():
        moved = (parts[name] != start.flatten().numpy()).any()
        assert moved == (name not in head)
