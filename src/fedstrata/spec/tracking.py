"""Trackers, which show a running experiment in TensorBoard and MLflow.

Trackers are callbacks that only read the records of a run, and do not store state in checkpoints. Trackers are not part
of a run's identity (the settings that must not change), so a run may be resumed with other trackers. A run writes
exactly the same files with and without trackers. In a tracker, a resumed run appears as one run, in which each round
appears once.
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
from fedstrata.spec.callbacks import Callback

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

    from fedstrata.runs.simulation import Simulation

TOKEN = "tracking.json"
"""The file in a run folder that contains the run's name in each tracker. A resumed run uses these names again."""

LONGEST = 500
"""The maximum number of characters of a setting's value.

Longer values are truncated, so that every tracker accepts them.
"""


class Tracker(Callback):
    """Base class of trackers. If a tracker fails, there is one warning, and the run continues without this tracker."""

    name: ClassVar[str] = ""

    def on_start(self, simulation: Simulation) -> None:
        """Start tracking a new run, or continue tracking a resumed run."""
        self.failed = False
        self._try(lambda: self.begin(simulation))

    def on_round(self, simulation: Simulation, record: Mapping[str, Any]) -> None:
        """Send the metrics of a round to the tracker."""
        self._try(lambda: self.show(record))

    def on_close(self, simulation: Simulation, history: History, error: BaseException | None) -> None:
        """Stop tracking the run."""
        self._try(lambda: self.end(simulation, history, error))

    def _try(self, work: Callable[[], None]) -> None:
        if getattr(self, "failed", False):
            return
        try:
            work()
        except SpecError:
            raise
        except Exception as error:
            self.failed = True
            problem = f"{type(error).__name__}: {error}"
            warnings.warn(f"{type(self).__name__} failed, and the run continues without it: {problem}", stacklevel=2)

    @abstractmethod
    def begin(self, simulation: Simulation) -> None:
        """Start tracking a run; see ``on_start``.

        Exceptions other than ``SpecError`` stop only the tracker, not the run.
        """

    @abstractmethod
    def show(self, record: Mapping[str, Any]) -> None:
        """Track the metrics of a round; see ``on_round``.

        Exceptions other than ``SpecError`` stop only the tracker, not the run.
        """

    @abstractmethod
    def end(self, simulation: Simulation, history: History, error: BaseException | None) -> None:
        """Stop tracking a run; see ``on_close``. Exceptions other than ``SpecError`` cause only a warning."""


class TensorBoard(Tracker):
    """Writes event files for TensorBoard, with the metrics of each round, the settings and the spec.

    Needs the optional packages of the extra ``tracking``.

    Args:
        dir: Folder for event files, with one subfolder per run. Default: ``tensorboard`` in the run folder.
    """

    dir: Annotated[str | None, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)] = None

    def check(self, evaluation: Evaluation) -> None:
        """Raise an error if the optional packages of the extra ``tracking`` are not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ExtraMissingError("TensorBoard", "tracking")

    def begin(self, simulation: Simulation) -> None:
        """Open the event files.

        If a resumed run repeats rounds, TensorBoard ignores the earlier records of these rounds.
        """
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        if self.dir is not None:
            folder = Path(self.dir) / stored_name(simulation.folder, "title", lambda: title(simulation))
        elif simulation.folder is not None:
            folder = simulation.folder / "tensorboard"
        else:
            problem = "is required, because this run does not have a run folder. Set tracking.tensorboard.dir."
            raise SpecError("tracking.tensorboard.dir", problem)
        is_new = simulation.round == 0
        # A resumed run writes some rounds again. TensorBoard ignores earlier records from the step (round) ``purge``
        # onwards.
        purge = 0 if is_new else simulation.round + 1
        self.writer: SummaryWriter | None = SummaryWriter(str(folder), purge_step=purge if folder.exists() else None)
        if is_new:
            self.writer.add_text("spec", f"```toml\n{simulation.spec.to_toml()}```", 0)
            writer = self.writer._get_file_writer()  # type: ignore[no-untyped-call]
            # TensorBoard's tab HPARAMS shows these metrics next to the settings.
            metrics = {"accuracy": None, "validation/accuracy": None}
            for summary in hparams(settings_of(simulation.spec), metrics):  # type: ignore[no-untyped-call]
                writer.add_summary(summary, 0)
        self.writer.flush()

    def show(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a round."""
        assert self.writer is not None
        for name, value in numbers(record).items():
            self.writer.add_scalar(name.replace(".", "/"), value, record["round"])
        self.writer.flush()

    def end(self, simulation: Simulation, history: History, error: BaseException | None) -> None:
        """Close the event files."""
        if (writer := getattr(self, "writer", None)) is not None:
            self.writer = None
            writer.close()


class MLflow(Tracker):
    """Logs the metrics of each round, the settings and the files of a run in MLflow.

    Needs the optional packages of the extra ``tracking``.

    Args:
        uri: Address of the tracking server or store, such as ``sqlite:///mlflow.db``. Default: the environment variable
            ``MLFLOW_TRACKING_URI``.
        experiment: Name of an existing or new experiment in MLflow.
        run: Name of the run in MLflow. Default: method, data set and seed.
        tags: Additional tags of the run in MLflow.
        artifacts: Whether to upload the run folder (without checkpoints) when the run ends.
    """

    uri: str | None = None
    experiment: str = "fedstrata"
    run: str | None = None
    tags: dict[str, str] | None = None
    artifacts: bool = True

    def check(self, evaluation: Evaluation) -> None:
        """Raise an error if the optional packages of the extra ``tracking`` are not installed."""
        if importlib.util.find_spec("mlflow") is None:
            raise ExtraMissingError("MLflow", "tracking")

    def begin(self, simulation: Simulation) -> None:
        """Create a run in MLflow. For a resumed run, find the existing run in MLflow."""
        from mlflow import MlflowClient, get_tracking_uri
        from mlflow.entities import Param

        with _locked_store(self.uri or get_tracking_uri()):
            self.client: MlflowClient = MlflowClient(tracking_uri=self.uri)
            experiment = self._experiment_id()
        # The token identifies the run in MLflow. It is stored before MLflow creates the run. A resumed run can
        # therefore find the run in MLflow even if the process was killed before MLflow replied.
        token, spec = stored_name(simulation.folder, "mlflow", lambda: uuid.uuid4().hex), simulation.spec
        runs = self.client.search_runs([experiment], f"tags.`fedstrata.run` = '{token}'", max_results=1)
        if runs:
            self.run_id: str | None = runs[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            tags = {"fedstrata.run": token, "method": spec.method.name, "data": str(spec.data.name)}
            tags |= {"seed": str(spec.seed), "fedstrata.folder": str(simulation.folder or "")} | (self.tags or {})
            name = self.run or title(simulation)
            self.run_id = self.client.create_run(experiment, tags=tags, run_name=name).info.run_id
        logged = self.client.get_run(self.run_id).data
        # MLflow does not allow changes of parameters, so only new parameters are logged after a resume.
        params = {_mlflow_name(key): value for key, value in settings_of(spec).items()}
        new = [Param(name, value) for name, value in params.items() if name not in logged.params]
        self.client.log_batch(self.run_id, params=new)
        self.last_rounds = {
            name: max((each.step for each in self.client.get_metric_history(self.run_id, name)), default=0)
            for name in logged.metrics
        }

    def show(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a round, except the numbers that MLflow already has."""
        from mlflow.entities import Metric

        now, round = time.time_ns() // 1_000_000, record["round"]
        values = {_mlflow_name(name): value for name, value in numbers(record).items()}
        metrics = [Metric(name, values[name], now, round) for name in values if self.last_rounds.get(name, 0) < round]
        self.client.log_batch(self.run_id, metrics=metrics)

    def end(self, simulation: Simulation, history: History, error: BaseException | None) -> None:
        """Upload the files of the run folder, and set the status of the run in MLflow."""
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

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        for _ in range(2):
            if (experiment := self.client.get_experiment_by_name(self.experiment)) is not None:
                return str(experiment.experiment_id)
            with suppress(MlflowException):  # another process may have created the experiment at the same time
                return str(self.client.create_experiment(self.experiment))
        raise SpecError(
            "tracking.mlflow.experiment",
            "MLflow does not have this experiment, and cannot create it. Check tracking.mlflow.uri.",
            self.experiment,
        )


def stored_name(folder: Path | None, key: str, make: Callable[[], str]) -> str:
    """Return the name of a run in a tracker. When the name is first used, it is stored in the run folder.

    Args:
        folder: The run folder, or None if the run does not have one. With None, the name is not stored.
        key: The key under which the file ``tracking.json`` stores the name.
        make: A function that returns a new name.
    """
    if folder is None:
        return make()
    names: Any = None
    with suppress(OSError, ValueError):
        names = json.loads((folder / TOKEN).read_text(encoding="utf-8"))
    names = names if isinstance(names, dict) else {}
    if not isinstance(names.get(key), str):
        names[key] = make()
        write_json(folder / TOKEN, names)
    return str(names[key])


@contextmanager
def _locked_store(uri: str) -> Iterator[None]:
    """If MLflow's store is an SQLite file, lock it in the ``with`` block, so that only one process creates it."""
    path = uri.removeprefix("sqlite:///")
    if path == uri:
        yield
        return
    name = sha256(f"{getpass.getuser()} {Path(path).absolute()}".encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir()) / f"fedstrata-mlflow-{name}.lock"):
        yield


def _switched(value: object) -> object:
    """Convert ``true`` to an empty dict (a tracker with default settings), and ``false`` to None (not tracked)."""
    if isinstance(value, bool):
        return {} if value else None
    if value is None or isinstance(value, (Mapping, Callback)):
        return value
    raise ValueError("must be true, false or a table of settings.")


class Tracking(Setting):
    """Programs that display runs. You may change these settings when you resume a run.

    Args:
        tensorboard: Settings for TensorBoard, or ``true`` for the defaults.
        mlflow: Settings for MLflow, or ``true`` for the defaults.
    """

    tensorboard: Annotated[
        bool | TensorBoard | None, from_word(TensorBoard), BeforeValidator(_switched), MayChange()
    ] = None
    mlflow: Annotated[bool | MLflow | None, from_word(MLflow), BeforeValidator(_switched), MayChange()] = None

    @property
    def callbacks(self) -> list[Callback]:
        """The trackers that are switched on."""
        return [each for each in (self.tensorboard, self.mlflow) if isinstance(each, Callback)]


def title(simulation: Simulation) -> str:
    """Return a name for a run, made of its method, data, seed and a hash of its identity."""
    spec, data = simulation.spec, Path(str(simulation.spec.data.name)).stem
    digest = sha256(json.dumps(simulation.identity, sort_keys=True).encode()).hexdigest()[:8]
    return re.sub(r"[^\w\-.]", "_", f"{spec.method.name}-{data}-seed-{spec.seed}-{digest}")


def settings_of(spec: Any) -> dict[str, str]:
    """Return a mapping from the dotted key of each setting, except ``tracking``, to its value as a string.

    Strings are truncated to ``LONGEST`` characters.
    """
    table = {key: value for key, value in spec.to_spec().items() if key != "tracking"}
    return {key: str(value)[:LONGEST] for key, value in _flat(table)}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _mlflow_name(name: str) -> str:
    """Replace characters that MLflow does not accept in names."""
    return re.sub(r"[^\w\-./ ]", "_", name)[:250]
