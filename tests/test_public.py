from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import fedstrata as fs

NAMES = """
    Aggregator Always Assignment Availability BSMFedAvg Bernoulli Callback Classes ClientSampler ClusteredSampling
    Codec Communication Data DataError DataSampler Dataset Dirichlet Domains EarlyStopping Evaluation Experiment
    FedAvg FedAvgFT FedBABU FedDyn FedLC FedProx FedRS FedSSAR FedSTS FedSTaS FedSampling FedTAN Federation Fit Given
    Grouped Groups History IID KeepBest MLflow MOON MeanBySize Method Metric Model Natural Objective Partition
    Persistent Population PowerLaw PowerOfChoice Predictions Predictor ReBaFL Recipe RunFolder SCAFFOLD SFL Schema
    Selection Shards Simulation SingleClient SpecError Stratify TensorBoard Trace Training Weights __version__ compare
    from_arrays from_dataframe load load_runs numbers plot prepare record run search setting_of sweep uniforms
"""
PUBLIC = NAMES.split()


def test_the_public_names():
    assert sorted(fs.__all__) == PUBLIC
    assert dir(fs) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_is_there_and_has_a_docstring(name):
    if name in fs._HOMES:  # whose modules may have been imported in any order
        importlib.import_module(f"fedstrata.{fs._HOMES[name]}")
    value = getattr(fs, name)
    assert value is not None
    if name != "__version__":
        assert value.__name__ == name
        assert (value.__doc__ or "").strip()


def test_no_module_hides_a_public_name():
    modules = {module.name for module in pkgutil.iter_modules(fs.__path__)}
    assert modules & set(PUBLIC) == set()


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'fedstrata' has no attribute 'FedAvgg'"):
        fs.FedAvgg  # noqa: B018


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_importing_fedstrata_does_not_wait_for_pytorch():
    heavy = "{'torch', 'numpy', 'pydantic', 'sklearn', 'matplotlib', 'rich', 'jinja2', 'datasets'}"
    code = f"import sys, fedstrata, fedstrata.cli; print(sorted({heavy} & set(sys.modules)))"
    assert in_a_new_process(code) == "[]"


@pytest.mark.slow
def test_a_run_without_a_folder_imports_nothing_for_reports_the_hub_or_a_compiler():
    code = (
        "import sys, fedstrata as fs; fs.run(fs.Experiment(training={'rounds': 1}));"
        "print(sorted({'matplotlib', 'jinja2', 'datasets', 'ray', 'nvflare', 'torch._dynamo'} & set(sys.modules)))"
    )
    assert in_a_new_process(code) == "[]"
