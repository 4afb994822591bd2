"""Runs in TensorBoard and MLflow, while they go on.

Trackers are callbacks, and what they are told is what a run records anyway: they remember nothing in its checkpoints,
and are no part of what a run is, so that a run is the same to the byte with and without them. A run that is resumed
goes on where it was shown before, and no round of it is there twice.
"""

from __future__ import annotations

import getpass
import importlib.util
import json
import re
import tempfile
import time
import uuid
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from filelock import FileLock
from pydantic import BeforeValidator

from fedstrata.base.config import MayChange, Setting, from_word
from fedstrata.base.errors import ExtraMissingError, SpecError
from fedstrata.base.jsonl import write_json
from fedstrata.base.locking import LOCK
from fedstrata.evaluation.history import History, numbers
from fedstrata.evaluation.settings import Evaluation
from fedstrata.spec.callbacks import Callback, Watched

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

TOKEN = "tracking.json"
"""In a run folder: by what name a tracker knows the run, for when it is resumed."""

LONGEST = 500
"""Characters of a setting that a tracker is told: all of them take as many."""

AT_ONCE = 100
"""Settings or metrics in one message to MLflow."""


def _text(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


Folder = Annotated[str | None, BeforeValidator(_text)]


class Tracker(Callback):
    """Shows a run elsewhere: where that fails, a warning says so once, and the run goes on without it."""

    name: ClassVar[str] = ""

    def on_start(self, simulation: Watched) -> None:
        """Begin, or go on where the run was shown before."""
        self.lost = False
        self._try(lambda: self.begin(simulation))

    def on_round(self, simulation: Watched, record: Mapping[str, Any]) -> None:
        """Show a round."""
        self._try(lambda: self.show(record))

    def on_close(self, simulation: Watched, history: History, error: BaseException | None) -> None:
        """End."""
        self._try(lambda: self.end(simulation, history, error))

    def _try(self, work: Callable[[], None]) -> None:
        if getattr(self, "lost", False):
            return
        try:
            work()
        except SpecError:
            raise
        except Exception as problem:
            self.lost = True
            name, what = type(self).__name__, f"{type(problem).__name__}: {problem}"
            warnings.warn(f"{name} is lost for the rest of this run: {what}", stacklevel=2)

    @abstractmethod
    def begin(self, simulation: Watched) -> None:
        """``on_start``, which may fail."""

    @abstractmethod
    def show(self, record: Mapping[str, Any]) -> None:
        """``on_round``, which may fail."""

    @abstractmethod
    def end(self, simulation: Watched, history: History, error: BaseException | None) -> None:
        """``on_close``, which may fail."""


class TensorBoard(Tracker):
    """Event files for TensorBoard: every number of a round, the settings and, as text, the spec.

    Needs the extra ``tracking``.

    Args:
        dir: Where to; each run gets a folder of its own there, called by what it is. Unless given the folder
            ``tensorboard`` in the run's own one.
    """

    name: ClassVar[str] = ""
    dir: Folder = None

    def check(self, evaluation: Evaluation) -> None:
        """The extra is needed."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ExtraMissingError("TensorBoard", "tracking")

    def begin(self, simulation: Watched) -> None:
        """Open the files; what they have of rounds that come again is void."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        if self.dir is None and simulation.folder is None:
            raise SpecError("tracking.tensorboard.dir", "needed for a run that has no folder: where do its files go?")
        if self.dir is not None:
            place = Path(self.dir) / kept(simulation.folder, "title", lambda: title(simulation))
        else:
            assert simulation.folder is not None
            place = simulation.folder / "tensorboard"
        fresh = simulation.round == 0
        # Readers drop what earlier files have from this step on.
        purge = 0 if fresh else simulation.round + 1
        self.writer: SummaryWriter | None = SummaryWriter(str(place), purge_step=purge if place.exists() else None)
        if fresh:
            self.writer.add_text("spec", f"```toml\n{simulation.spec.to_toml()}```", 0)
            # The settings as the page HPARAMS shows them, beside the final accuracies.
            writer = self.writer._get_file_writer()  # type: ignore[no-untyped-call]
            metrics = {"accuracy": None, "validation/accuracy": None}
            for summary in hparams(settings_of(simulation.spec), metrics):  # type: ignore[no-untyped-call]
                writer.add_summary(summary, 0)
        self.writer.flush()

    def show(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a round, and hand them to the system."""
        assert self.writer is not None
        for name, value in numbers(record).items():
            self.writer.add_scalar(name.replace(".", "/"), value, record["round"])
        self.writer.flush()

    def end(self, simulation: Watched, history: History, error: BaseException | None) -> None:
        """Close the files."""
        if (writer := getattr(self, "writer", None)) is not None:
            self.writer = None
            writer.close()


class MLflow(Tracker):
    """A run of MLflow: every number of a round as metrics, settings as parameters, the run folder's files as artifacts.

    Needs the extra ``tracking``.

    Args:
        uri: The tracking server or store, such as ``http://localhost:5000`` or ``sqlite:///mlflow.db``; what MLflow
            itself takes (``MLFLOW_TRACKING_URI``) unless given.
        experiment: The experiment's name; made where there is none.
        run: The run's name; by its method, data and seed unless given.
        tags: More tags, by name.
        artifacts: Whether the files of the run folder are uploaded at the end, but for checkpoints.
    """

    name: ClassVar[str] = ""
    uri: str | None = None
    experiment: str = "fedstrata"
    run: str | None = None
    tags: dict[str, str] | None = None
    artifacts: bool = True

    def check(self, evaluation: Evaluation) -> None:
        """The extra is needed."""
        if importlib.util.find_spec("mlflow") is None:
            raise ExtraMissingError("MLflow", "tracking")

    def begin(self, simulation: Watched) -> None:
        """Begin a run, or find the one that this run had before it was resumed."""
        from mlflow import MlflowClient, get_tracking_uri

        with _alone(self.uri or get_tracking_uri()):
            self.client: MlflowClient = MlflowClient(tracking_uri=self.uri)
            place = self._experiment()
        # Written down before there is a run, so that a kill leaves no second one.
        token = kept(simulation.folder, "mlflow", lambda: uuid.uuid4().hex)
        found = self.client.search_runs([place], f"tags.`fedstrata.run` = '{token}'", max_results=1)
        if found:
            self.run_id: str | None = found[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            spec = simulation.spec
            tags = {"fedstrata.run": token, "method": spec.method.name, "data": str(spec.data.name)}
            tags |= {"seed": str(spec.seed), "fedstrata.folder": str(simulation.folder or "")} | (self.tags or {})
            self.run_id = self.client.create_run(place, tags=tags, run_name=self.run or title(simulation)).info.run_id
        known = self.client.get_run(self.run_id).data
        self._tell_settings(settings_of(simulation.spec), known.params)
        self.last = {
            name: max((each.step for each in self.client.get_metric_history(self.run_id, name)), default=0)
            for name in known.metrics
        }

    def show(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a round that are not there yet."""
        from mlflow.entities import Metric

        now, round = time.time_ns() // 1_000_000, record["round"]
        found = [
            Metric(allowed, value, now, round)
            for name, value in numbers(record).items()
            if self.last.get(allowed := _allowed(name), 0) < round
        ]
        for some in _chunks(found):
            self.client.log_batch(self.run_id, metrics=some)

    def end(self, simulation: Watched, history: History, error: BaseException | None) -> None:
        """Upload the files, and say how the run ended."""
        run: str | None = getattr(self, "run_id", None)
        if run is None:
            return
        self.run_id = None
        if error is None:
            for key, text in (("stopped", history.stopped), ("warning", history.warning)):
                if text:
                    self.client.set_tag(run, f"fedstrata.{key}", text)
            if self.artifacts and simulation.folder is not None:
                for path in sorted(simulation.folder.iterdir()):
                    if path.is_file() and path.name not in (TOKEN, LOCK):
                        self.client.log_artifact(run, str(path))
        status = "FINISHED" if error is None else "FAILED" if isinstance(error, Exception) else "KILLED"
        self.client.set_terminated(run, status)

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        for _ in range(2):
            if (found := self.client.get_experiment_by_name(self.experiment)) is not None:
                return str(found.experiment_id)
            with suppress(MlflowException):  # another process may have made it meanwhile
                return str(self.client.create_experiment(self.experiment))
        raise SpecError("tracking.mlflow.experiment", "MLflow neither has it nor makes it", self.experiment)

    def _tell_settings(self, settings: Mapping[str, str], known: Mapping[str, str]) -> None:
        """Log what is not there; MLflow's parameters never change, and more rounds are seen by their metrics."""
        from mlflow.entities import Param

        new = [Param(_allowed(key), value) for key, value in settings.items() if _allowed(key) not in known]
        for some in _chunks(new):
            self.client.log_batch(self.run_id, params=some)


def kept(folder: Path | None, key: str, make: Callable[[], str]) -> str:
    """By what name a tracker knows a run: written into its folder, and read there when it is resumed."""
    if folder is None:
        return make()
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads((folder / TOKEN).read_text(encoding="utf-8"))
        known = found if isinstance(found, dict) else {}
    if not isinstance(known.get(key), str):
        known[key] = make()
        write_json(folder / TOKEN, known)
    name: str = known[key]
    return name


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Nobody else on this machine makes the same local store meanwhile: MLflow leaves a broken one where two do."""
    path = uri.removeprefix("sqlite:///")
    if path == uri:
        yield
        return
    name = sha256(f"{getpass.getuser()} {Path(path).absolute()}".encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir()) / f"fedstrata-mlflow-{name}.lock"):
        yield


def _switched(value: object) -> object:
    """``true`` for a tracker with its defaults, ``false`` for none."""
    if isinstance(value, bool):
        return {} if value else None
    if value is None or isinstance(value, (Mapping, Callback)):
        return value
    raise ValueError("expected true, false or a table of its settings")


class Tracking(Setting):
    """Where else a run is shown while it goes on; no part of what it is, so that it may change whenever it is resumed.

    Args:
        tensorboard: TensorBoard's event files; ``true`` for its defaults.
        mlflow: A run of MLflow; ``true`` for its defaults.
    """

    tensorboard: Annotated[
        bool | TensorBoard | None, from_word(TensorBoard), BeforeValidator(_switched), MayChange()
    ] = None
    mlflow: Annotated[bool | MLflow | None, from_word(MLflow), BeforeValidator(_switched), MayChange()] = None

    @property
    def callbacks(self) -> list[Callback]:
        """The trackers."""
        return [each for each in (self.tensorboard, self.mlflow) if isinstance(each, Callback)]


def title(simulation: Watched) -> str:
    """What a tracker calls a run: the same for the same run, another for any other."""
    spec, text = simulation.spec, json.dumps(simulation.identity, sort_keys=True)
    data = Path(str(spec.data.name)).stem
    return re.sub(
        r"[^\w\-.]", "_", f"{spec.method.name}-{data}-seed-{spec.seed}-{sha256(text.encode()).hexdigest()[:8]}"
    )


def settings_of(spec: Any) -> dict[str, str]:
    """All settings by their dotted keys, as text of at most ``LONGEST`` characters, but where a run is shown."""
    table = {key: value for key, value in spec.to_spec().items() if key != "tracking"}
    return {key: str(value)[:LONGEST] for key, value in _flat(table)}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _allowed(name: str) -> str:
    """A name as MLflow takes it."""
    return re.sub(r"[^\w\-./ ]", "_", name)[:250]


def _chunks(items: list[Any]) -> Iterator[list[Any]]:
    yield from (items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE))
