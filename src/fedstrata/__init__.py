"""fedstrata: federated learning that holds up when clients' data are non-IID and clients drop out.

>>> import fedstrata as fs
>>> spec = fs.Experiment(method=fs.SCAFFOLD(), partition=fs.Dirichlet(alpha=0.1, clients=20),
...                      training=fs.Training(rounds=2))
>>> len(fs.run(spec))
2
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstrata.aggregation.base import Aggregator as Aggregator
    from fedstrata.aggregation.base import MeanBySize as MeanBySize
    from fedstrata.base.errors import DataError as DataError
    from fedstrata.base.errors import SpecError as SpecError
    from fedstrata.base.records import record as record
    from fedstrata.base.rng import uniforms as uniforms
    from fedstrata.data.dataset import Dataset as Dataset
    from fedstrata.data.dataset import from_arrays as from_arrays
    from fedstrata.data.partitions import IID as IID
    from fedstrata.data.partitions import Assignment as Assignment
    from fedstrata.data.partitions import Classes as Classes
    from fedstrata.data.partitions import Dirichlet as Dirichlet
    from fedstrata.data.partitions import Domains as Domains
    from fedstrata.data.partitions import Given as Given
    from fedstrata.data.partitions import Groups as Groups
    from fedstrata.data.partitions import Natural as Natural
    from fedstrata.data.partitions import Partition as Partition
    from fedstrata.data.partitions import PowerLaw as PowerLaw
    from fedstrata.data.partitions import Shards as Shards
    from fedstrata.data.partitions import SingleClient as SingleClient
    from fedstrata.data.schema import Schema as Schema
    from fedstrata.data.sources import Data as Data
    from fedstrata.data.tables import from_dataframe as from_dataframe
    from fedstrata.evaluation.history import History as History
    from fedstrata.evaluation.history import numbers as numbers
    from fedstrata.evaluation.metrics import Metric as Metric
    from fedstrata.evaluation.predictions import Predictions as Predictions
    from fedstrata.evaluation.settings import Evaluation as Evaluation
    from fedstrata.experiments.compare import compare as compare
    from fedstrata.experiments.run import run as run
    from fedstrata.experiments.search import search as search
    from fedstrata.experiments.sweep import sweep as sweep
    from fedstrata.federation.availability import Always as Always
    from fedstrata.federation.availability import Availability as Availability
    from fedstrata.federation.availability import Bernoulli as Bernoulli
    from fedstrata.federation.availability import Grouped as Grouped
    from fedstrata.federation.availability import Persistent as Persistent
    from fedstrata.federation.availability import Population as Population
    from fedstrata.federation.availability import Trace as Trace
    from fedstrata.federation.communication.codecs import Codec as Codec
    from fedstrata.federation.communication.codecs import Communication as Communication
    from fedstrata.federation.federation import Federation as Federation
    from fedstrata.federation.messages import Fit as Fit
    from fedstrata.federation.messages import Weights as Weights
    from fedstrata.federation.settings import Privacy as Privacy
    from fedstrata.federation.settings import Training as Training
    from fedstrata.methods.base import Method as Method
    from fedstrata.methods.base import Recipe as Recipe
    from fedstrata.methods.base import setting_of as setting_of
    from fedstrata.methods.bsm import BSMFedAvg as BSMFedAvg
    from fedstrata.methods.clustered import ClusteredSampling as ClusteredSampling
    from fedstrata.methods.fedavg import FedAvg as FedAvg
    from fedstrata.methods.fedavg_ft import FedAvgFT as FedAvgFT
    from fedstrata.methods.fedbabu import FedBABU as FedBABU
    from fedstrata.methods.feddyn import FedDyn as FedDyn
    from fedstrata.methods.fedlc import FedLC as FedLC
    from fedstrata.methods.fedprox import FedProx as FedProx
    from fedstrata.methods.fedrs import FedRS as FedRS
    from fedstrata.methods.fedsampling import FedSampling as FedSampling
    from fedstrata.methods.fedssar import FedSSAR as FedSSAR
    from fedstrata.methods.fedstas import FedSTaS as FedSTaS
    from fedstrata.methods.fedstas import FedSTS as FedSTS
    from fedstrata.methods.fedtan import FedTAN as FedTAN
    from fedstrata.methods.moon import MOON as MOON
    from fedstrata.methods.power_of_choice import PowerOfChoice as PowerOfChoice
    from fedstrata.methods.rebafl import ReBaFL as ReBaFL
    from fedstrata.methods.scaffold import SCAFFOLD as SCAFFOLD
    from fedstrata.methods.sfl import SFL as SFL
    from fedstrata.models import Model as Model
    from fedstrata.objectives.base import Objective as Objective
    from fedstrata.reporting.plots import plot as plot
    from fedstrata.reporting.runs import load_runs as load_runs
    from fedstrata.runs.predictor import Predictor as Predictor
    from fedstrata.runs.predictor import load as load
    from fedstrata.runs.preparation import prepare as prepare
    from fedstrata.runs.run_folder import RunFolder as RunFolder
    from fedstrata.runs.simulation import Simulation as Simulation
    from fedstrata.sampling.base import ClientSampler as ClientSampler
    from fedstrata.sampling.base import DataSampler as DataSampler
    from fedstrata.sampling.base import Selection as Selection
    from fedstrata.spec.callbacks import Callback as Callback
    from fedstrata.spec.callbacks import EarlyStopping as EarlyStopping
    from fedstrata.spec.callbacks import KeepBest as KeepBest
    from fedstrata.spec.experiment import Experiment as Experiment
    from fedstrata.spec.tracking import MLflow as MLflow
    from fedstrata.spec.tracking import TensorBoard as TensorBoard
    from fedstrata.stratify.method import Stratify as Stratify

__version__ = "0.1.0"

# Where each public name lives: importing fedstrata alone must not wait for PyTorch.
_HOMES = {
    "compare": "experiments.compare",
    "sweep": "experiments.sweep",
    "search": "experiments.search",
    "plot": "reporting.plots",
    "run": "experiments.run",
    "load": "runs.predictor",
    "load_runs": "reporting.runs",
    "Predictor": "runs.predictor",
    "prepare": "runs.preparation",
    "Simulation": "runs.simulation",
    "RunFolder": "runs.run_folder",
    "Experiment": "spec.experiment",
    "History": "evaluation.history",
    "numbers": "evaluation.history",
    "Training": "federation.settings",
    "Privacy": "federation.settings",
    "Evaluation": "evaluation.settings",
    "Metric": "evaluation.metrics",
    "Predictions": "evaluation.predictions",
    "Codec": "federation.communication.codecs",
    "Communication": "federation.communication.codecs",
    "Callback": "spec.callbacks",
    "EarlyStopping": "spec.callbacks",
    "KeepBest": "spec.callbacks",
    "MLflow": "spec.tracking",
    "TensorBoard": "spec.tracking",
    "Data": "data.sources",
    "Dataset": "data.dataset",
    "from_arrays": "data.dataset",
    "from_dataframe": "data.tables",
    "Schema": "data.schema",
    "Partition": "data.partitions",
    "Assignment": "data.partitions",
    "IID": "data.partitions",
    "Dirichlet": "data.partitions",
    "Classes": "data.partitions",
    "Shards": "data.partitions",
    "Groups": "data.partitions",
    "Domains": "data.partitions",
    "PowerLaw": "data.partitions",
    "Given": "data.partitions",
    "Natural": "data.partitions",
    "SingleClient": "data.partitions",
    "Always": "federation.availability",
    "Availability": "federation.availability",
    "Population": "federation.availability",
    "Bernoulli": "federation.availability",
    "Persistent": "federation.availability",
    "Grouped": "federation.availability",
    "Trace": "federation.availability",
    "Method": "methods.base",
    "Recipe": "methods.base",
    "FedAvg": "methods.fedavg",
    "SCAFFOLD": "methods.scaffold",
    "FedSTS": "methods.fedstas",
    "FedSTaS": "methods.fedstas",
    "SFL": "methods.sfl",
    "FedTAN": "methods.fedtan",
    "FedProx": "methods.fedprox",
    "FedSSAR": "methods.fedssar",
    "FedSampling": "methods.fedsampling",
    "ClusteredSampling": "methods.clustered",
    "PowerOfChoice": "methods.power_of_choice",
    "Stratify": "stratify.method",
    "BSMFedAvg": "methods.bsm",
    "FedAvgFT": "methods.fedavg_ft",
    "FedBABU": "methods.fedbabu",
    "FedDyn": "methods.feddyn",
    "FedLC": "methods.fedlc",
    "FedRS": "methods.fedrs",
    "MOON": "methods.moon",
    "ReBaFL": "methods.rebafl",
    "Model": "models",
    "Objective": "objectives.base",
    "ClientSampler": "sampling.base",
    "DataSampler": "sampling.base",
    "Aggregator": "aggregation.base",
    "setting_of": "methods.base",
    "Federation": "federation.federation",
    "Fit": "federation.messages",
    "Weights": "federation.messages",
    "MeanBySize": "aggregation.base",
    "Selection": "sampling.base",
    "record": "base.records",
    "uniforms": "base.rng",
    "DataError": "base.errors",
    "SpecError": "base.errors",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fedstrata' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fedstrata.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
