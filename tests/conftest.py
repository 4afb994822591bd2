"""Settings and fixtures that most tests share, such as a small federation."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import matrix
import numpy as np
import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import settings
from torch import nn

import fedstrata as fs
from fedstrata.base.rng import torch_seeded
from fedstrata.clients.client import ClientContext, StateStore
from fedstrata.data.dataset import Dataset, from_arrays
from fedstrata.data.partitions.base import Assignment
from fedstrata.data.partitions.picture import draw_partition
from fedstrata.data.sources import Data
from fedstrata.data.tasks.base import Task
from fedstrata.engines import make_engine, worker_pool
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.availability import Always, Availability
from fedstrata.federation.engine import Engine, FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fit, Weights
from fedstrata.federation.settings import Training
from fedstrata.methods.base import Method
from fedstrata.models.batchnorm import federate_batchnorm
from fedstrata.models.model import Model
from fedstrata.objectives.base import CrossEntropy, Objective
from fedstrata.runs import run_folder, simulation
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import HANDLERS, Simulation

# Processes that tests start use one thread each, so that two of them do not compete for the processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# By default, Ray gives its workers a low priority, so they would wait for all other tests.
os.environ.setdefault("RAY_worker_niceness", "0")
torch.set_num_threads(1)
# Hypothesis has no deadline for examples, because their time depends on the load of the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for doctests only in the source: tests have none, and a module imported twice declares its records twice."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Save time in all tests: only they make garbage, and pytest need not watch each of PyTorch's loggers."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True  # pytest hears these at the root
    return result


FEATURES, CLASSES = 5, 3
GREY = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c636800000082008177cd72b60000000049454e44ae426082"
)
"""A PNG file with one pixel."""


@pytest.fixture(scope="session", autouse=True)
def _spare_time() -> Iterator[None]:
    """Save time in all tests: read the digits once, use no worker processes, and do not draw pictures of partitions."""
    load, read = Data.load, dict[tuple[str, int], Dataset]()

    def load_once(data: Data, seed: int = 0, task: Task | None = None) -> Dataset:
        if data.name != "digits" or task is not None:
            return load(data, seed, task)
        key = data.model_dump_json(), seed
        if key not in read:
            read[key] = load(data, seed)
        return read[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Data, "load", load_once)
        # Several tests run at the same time already, and workers save time only in long rounds.
        patch.setattr(worker_pool, "cores", lambda: 1)
        patch.setattr(run_folder, "draw_partition", lambda assignment, data, path: path.write_bytes(GREY))
        yield


RAY = ExitStack()
"""What ends the session of Ray, if one was started."""


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """Two Ray workers for all tests, because starting them takes longer than a short run."""
    ray = pytest.importorskip("ray")
    from fedstrata.engines.ray import WorkerPool

    logging.getLogger("ray").setLevel(logging.ERROR)
    with RAY:
        RAY.callback(ray.shutdown)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent / "support"), prepend=os.pathsep)
            ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield RAY.enter_context(WorkerPool(2))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop Ray after the last test that starts servers, because its idle processes would slow down all other tests."""
    # Without pytest-xdist, tests are not sorted, so that a later test may need Ray again.
    sorted_tests = item.config.pluginmanager.hasplugin("xdist")
    if sorted_tests and nextitem is not None and is_with_servers(item) and not is_with_servers(nextitem):
        RAY.close()


@pytest.fixture
def on_ray(pool: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., fs.History]:
    """``fedstrata.run`` on two Ray workers."""
    from fedstrata.engines.ray import RayEngine

    def make(name: str, context: ClientContext, store: StateStore) -> Engine:
        return RayEngine(context, store, pool=pool) if name == "ray" else make_engine(name, context, store)

    monkeypatch.setattr(simulation, "make_engine", make)
    return partial(fs.run, engine="ray")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test draw the real picture of a partition in run folders."""
    monkeypatch.setattr(run_folder, "draw_partition", draw_partition)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Distribute tests to the processes of pytest-xdist: by file, and all files that start servers to the same process.

    The fixtures of a file are then made once, and two sessions of Ray or NVFlare never run at the same time. Groups
    with the most slow tests come first, so that the processes end at about the same time.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    slow: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        slow[group_of(item)] += item.get_closest_marker("slow") is not None
    items.sort(key=lambda item: (group_of(item) != "servers", -slow[group_of(item)], group_of(item)))


def is_with_servers(item: pytest.Item) -> bool:
    """Return True if the test may start Ray or NVFlare."""
    marker = item.get_closest_marker("xdist_group")
    return marker is not None and marker.args[0] == "servers"


def group_of(item: pytest.Item) -> str:
    """Return the name of the group of tests that one process of pytest-xdist runs."""
    return str(item.get_closest_marker("xdist_group").args[0])


class Tiny(Federation):
    """A federation with shortcuts to data that tests check."""

    engine: LocalEngine

    @property
    def weights(self) -> Weights:
        """The initial model."""
        return Weights(self.config.model.params(), self.config.model.buffers())

    @property
    def store(self) -> StateStore:
        """The clients' states."""
        return self.engine.store

    def fits(self, *clients: int) -> dict[int, Fit]:
        """Return a request to train for each client; by default, for all clients."""
        who = clients or range(self.config.clients)
        return dict.fromkeys(who, Fit(self.round, self.weights, {}, 1.0))

    def fit(self, *clients: int, **how: Any) -> dict[int, Any]:
        """Ask clients to train, by default all clients, and return their answers."""
        return self.ask(fits := self.fits(*clients), next(iter(fits.values())), work=float, **how)

    def reasons(self, kind: str) -> list[str]:
        """Return the reasons in the events of one kind."""
        return [event["reason"] for event in self.events if event["kind"] == kind]


@pytest.fixture
def tiny() -> Callable[..., Tiny]:
    """Return a function that builds a federation of a few clients with eight samples each, in round 1."""

    def build(
        clients: int = 4,
        *,
        availability: Availability | None = None,
        objective: Objective | None = None,
        module: nn.Module | None = None,
        sizes: list[int] | None = None,
        store: StateStore | None = None,
        handlers: Sequence[Callable[..., object]] = (),
        **training: object,
    ) -> Tiny:
        sizes = sizes or [8] * clients
        n, generator = sum(sizes), np.random.default_rng(0)
        x = generator.normal(size=(n + 30, FEATURES)).astype(np.float32)
        y = np.arange(n + 30) % CLASSES
        data = from_arrays(x[:n], y[:n], x[n:], y[n:], normalize="none")
        assignment = Assignment.from_lists(np.split(np.arange(n), np.cumsum(sizes)[:-1]))
        if module is None:
            with torch_seeded(0, "model"):
                module = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))
        federate_batchnorm(module)
        training = {"batch_size": 4} | ({} if "local_steps" in training else {"local_epochs": 1}) | training
        settings = Training(**training)
        config = FederationConfig(
            0, settings, Model(module), CLASSES, len(assignment), assignment.sizes, assignment.sizes, strata=CLASSES
        )
        context = ClientContext(config, data, assignment, objective or CrossEntropy(), HANDLERS + handlers)
        engine = LocalEngine(context, StateStore() if store is None else store)
        federation = Tiny(engine, config, availability or Always(), "toy")
        federation.begin(1)
        return federation

    return build


class Started(Simulation):
    """A run that a test continues round by round; its records do not contain times."""

    def step(self) -> dict[str, Any]:
        record = super().step()
        del record["seconds"]
        return record

    @property
    def config(self) -> FederationConfig:
        return self.prepared.config

    @property
    def method(self) -> Method:
        return self.spec.method


@pytest.fixture
def start() -> Callable[..., Started]:
    """Return a function that starts a run from a spec."""
    return lambda spec, data=None, model=None: Started(prepare(spec, data=data, model=model))


@pytest.fixture(scope="session")
def seven() -> Dataset:
    """Return a data set of seven samples with two features and three classes, which are not normalised."""
    x = [[0.5, -1.0], [1.5, 0.3], [-0.7, 0.8], [0.2, 0.9], [-1.1, -0.4], [0.6, 1.2], [-0.3, -1.6]]
    return from_arrays(x, [0, 1, 2, 0, 1, 2, 0], x, [0, 1, 2, 0, 1, 2, 0], normalize="none")


@pytest.fixture
def trace(tmp_path) -> Callable[[dict[int, list[int]]], dict[str, str]]:
    """Return a function that writes an availability trace from a mapping from clients to rounds."""

    def write(rounds: dict[int, list[int]]) -> dict[str, str]:
        lines = [f"{client},{t},{t}" for client, there in rounds.items() for t in there]
        (tmp_path / "trace.csv").write_text("\n".join(["client,first,last", *lines]))
        return {"name": "trace", "file": str(tmp_path / "trace.csv")}

    return write


# Set this before a test imports `datasets`, because tests must not use the network.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def labelled():
    """Return a function that builds a tabular data set with given training labels and domains."""

    def build(labels: object, domains: object = None) -> Dataset:
        y = np.asarray(labels)
        x = np.arange(len(y), dtype=np.float32)[:, None]
        names = [str(number) for number in range(int(y.max()) + 1)]
        domain = None if domains is None else np.asarray(domains)
        return from_arrays(
            x, y, x[:1], y[:1],
            class_names=names,
            domain_train=domain,
            domain_test=None if domain is None else domain[:1],
            domain_names=None if domain is None else [str(number) for number in range(int(domain.max()) + 1)],
        )  # fmt: skip

    return build


@pytest.fixture(scope="session")
def local() -> Callable[[str], fs.History]:
    """Return a function that runs a spec of ``matrix.MATRIX`` with the local engine, each only once."""
    return cache(lambda label: fs.run(matrix.MATRIX[label]))


@pytest.fixture
def in_an_empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test of a command an empty working directory, an empty home and no data sets."""
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("FEDSTRATA_DATA", str(home / "data"))
    monkeypatch.setenv("HOME", str(home))
    # Rich's console stores its width when it is made, and pytest-xdist sets COLUMNS for its workers.
    monkeypatch.setattr("rich._console", None)
    monkeypatch.delenv("COLUMNS", raising=False)
