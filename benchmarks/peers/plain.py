"""Do the work of ``work.py`` with plain PyTorch: ``DataLoader``, ``torch.optim.SGD``, and means of state dicts."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from work import Clock, final_loss, net, owners, parse, tensors


def main() -> None:
    _, setting = parse()
    x, y = tensors(setting)
    parts = [TensorDataset(x[mine], y[mine]) for mine in owners(setting)]
    model, clock, generator = net(setting.model), Clock(setting), np.random.default_rng(0)
    for _ in range(clock.rounds):
        states = []
        for client in generator.choice(setting.clients, setting.invited, replace=False):
            local = copy.deepcopy(model).train()
            optimizer = torch.optim.SGD(local.parameters(), lr=setting.lr)
            for _ in range(setting.epochs):
                for inputs, labels in DataLoader(parts[client], batch_size=setting.batch, shuffle=True):
                    optimizer.zero_grad()
                    F.cross_entropy(local(inputs), labels).backward()
                    optimizer.step()
                    clock.trained(1, len(labels))
            states.append(local.state_dict())
        model.load_state_dict({name: torch.stack([s[name] for s in states]).mean(0) for name in states[0]})
        clock.round_over()
    clock.report(final_loss(model, setting))


if __name__ == "__main__":
    main()
