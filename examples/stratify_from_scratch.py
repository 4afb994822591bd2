"""Stratify from scratch in one file, with PyTorch, scikit-learn's digits, ten clients and one core.

    python examples/stratify_from_scratch.py

Each client has images of one digit. FedAvg averages ten models that were each trained on one digit, so that the
global model learns little. In Stratify, a shuffled schedule of *labels* decides the order of the samples. For each
position of the schedule, a client trains on one of its samples with the label at this position. The global model is
therefore trained as in centralised SGD. In the mode single, the model is passed from client to client, and takes one
step per sample. In the mode batch, clients send gradients, whose sum is the gradient of a batch.

Paper: Stratify: label-aware sampling for federated learning on non-IID data. ``fedstrata.stratify.method`` implements
the same method for real use, with failures, masked labels and BatchNorm. The output compares this file with fedstrata.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

CLIENTS, EPOCHS, CHUNK, BATCH = 10, 5, 5, 32
rng = np.random.default_rng(0)
torch.manual_seed(0)

# ----------------------------------------------------------------------------------------------------------------------
# Data: 1,797 images of 8x8 pixels. The last 360 are the test set; client k gets the training images of digit k.

x, y = load_digits(return_X_y=True)
order = rng.permutation(len(y))
x = torch.tensor(x[order], dtype=torch.float32) / 8 - 1
y = torch.tensor(y[order])
x_test, y_test, x, y = x[-360:], y[-360:], x[:-360], y[:-360]
owned = [np.flatnonzero(y.numpy() == digit) for digit in range(CLIENTS)]


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


@torch.no_grad()
def accuracy(model):
    return float((model(x_test).argmax(1) == y_test).float().mean())


# ----------------------------------------------------------------------------------------------------------------------
# FedAvg, for comparison: each client trains for one epoch on its own samples, and the server averages the models.


def fedavg_round(model, lr=0.1):
    models = []
    for mine in owned:
        local = copy.deepcopy(model)
        optimizer = torch.optim.SGD(local.parameters(), lr)
        for part in np.array_split(rng.permutation(mine), -(-len(mine) // BATCH)):
            optimizer.zero_grad()
            F.cross_entropy(local(x[part]), y[part]).backward()
            optimizer.step()
        models.append(local.state_dict())
    sizes = [len(mine) for mine in owned]
    mean = {name: sum(n * m[name] for n, m in zip(sizes, models, strict=True)) / sum(sizes) for name in models[0]}
    model.load_state_dict(mean)


# ----------------------------------------------------------------------------------------------------------------------
# Stratify: the schedule and the clients (sections III-A and III-B of the paper).


class Client:
    """A client with its data. The server learns only which labels the client has, and when a label is used up."""

    def __init__(self, mine):
        self.mine = mine
        self.labels = set(y[mine].tolist())

    def new_epoch(self):
        """Shuffle the samples of each label, so that they are drawn without replacement."""
        self.pool = {label: list(rng.permutation(self.mine[y[self.mine].numpy() == label])) for label in self.labels}

    def draw(self, label):
        """Return a sample of the label, or None, and whether all samples of the label have been drawn."""
        sample = self.pool[label].pop() if self.pool[label] else None
        return sample, not self.pool[label]


def new_schedule():
    """Return a shuffled list in which label l occurs f_l times. Here, f_l = min(N(l), the median of all N)."""
    counts = np.bincount(y)
    frequencies = np.minimum(counts, int(np.median(counts)))
    return rng.permutation(np.repeat(np.arange(10), frequencies)).tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Mode single: Algorithm 1 chooses clients, and Algorithm 3 passes the model from client to client.


def longest_runs(chunk, available):
    """Repeatedly choose the client that can train the most successive positions (Algorithm 1)."""
    tasks, i = [], 0
    while i < len(chunk):
        best, length = [], 0
        for client in available[chunk[i]]:
            end = i
            while end < len(chunk) and client in available[chunk[end]]:
                end += 1
            if end - i > length:
                best, length = [], end - i
            if end - i == length:
                best.append(client)
        tasks.append((best[rng.integers(len(best))], chunk[i : i + length]))
        i += length
    return tasks


def single_epoch(model, clients, lr=0.02):
    for client in clients:
        client.new_epoch()
    available = {label: [k for k, client in enumerate(clients) if label in client.labels] for label in range(10)}
    schedule, hops = new_schedule(), 0
    while schedule:
        schedule = [label for label in schedule if available[label]]  # drop labels without unused samples
        chunk, schedule = schedule[:CHUNK], schedule[CHUNK:]
        for k, labels in longest_runs(chunk, available):
            hops += 1  # the model is passed to client k
            for label in labels:
                sample, exhausted = clients[k].draw(label)
                if exhausted and k in available[label]:
                    available[label].remove(k)
                if sample is None:  # put the label back into the schedule, at a random position
                    schedule.insert(rng.integers(len(schedule) + 1), label)
                    continue
                loss = F.cross_entropy(model(x[None, sample]), y[None, sample])
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for w, g in zip(model.parameters(), gradients, strict=True):
                        w -= lr * g
    return hops


# ----------------------------------------------------------------------------------------------------------------------
# Mode batch: Algorithm 2 chooses clients. Algorithm 4 adds their gradients of *summed* losses, and divides once.


def batch_epoch(model, clients, optimizer):
    for client in clients:
        client.new_epoch()
    available = {label: [k for k, client in enumerate(clients) if label in client.labels] for label in range(10)}
    schedule = new_schedule()
    for begin in range(0, len(schedule), BATCH):
        reserved = {}
        for label in schedule[begin : begin + BATCH]:
            sample = None
            while sample is None and available[label]:
                k = available[label][rng.integers(len(available[label]))]
                sample, exhausted = clients[k].draw(label)
                if exhausted:
                    available[label].remove(k)
            if sample is not None:
                reserved.setdefault(k, []).append(sample)
        sums = [torch.zeros_like(w) for w in model.parameters()]
        for samples in reserved.values():  # each client computes its own gradient
            loss = F.cross_entropy(model(x[samples]), y[samples], reduction="sum")
            for total, g in zip(sums, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                total += g
        count = sum(len(samples) for samples in reserved.values())
        for w, total in zip(model.parameters(), sums, strict=True):
            w.grad = total / count
        optimizer.step()


# ----------------------------------------------------------------------------------------------------------------------
# The function library() runs the mode batch in fedstrata, with the same data, model and settings.


def library():
    import fedstrata as fs

    training = {"rounds": EPOCHS, "batch_size": BATCH, "lr": 0.1, "momentum": 0.9}
    spec = {"method": "stratify", "training": training, "partition": {"name": "given", "indices": owned}}
    return fs.run(spec, data=(x, y, x_test, y_test), model=new_model())[-1]["accuracy"]


def main():
    print(f"{'epoch':>5} {'FedAvg':>8} {'single':>8} {'batch':>8}    hops")
    averaged, single, batch = new_model(), new_model(), new_model()
    clients = [Client(mine) for mine in owned]
    optimizer = torch.optim.SGD(batch.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(1, EPOCHS + 1):
        fedavg_round(averaged)
        hops = single_epoch(single, clients)
        batch_epoch(batch, clients, optimizer)
        row = [f"{100 * accuracy(model):7.1f}%" for model in (averaged, single, batch)]
        print(f"{epoch:5} {' '.join(row)}   {hops:5}")
    print(f"fedstrata's own batch mode after {EPOCHS} epochs: {100 * library():.1f}%")


if __name__ == "__main__":
    main()
