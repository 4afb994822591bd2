from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedstrata as fs

ROOT = Path(__file__).resolve().parents[1]

NAMES = """
Aggregator Allowed Always Assignment Attack Availability BSMFedAvg Batch Bernoulli Bound CCVR Callback Classes
Classification Client ClientSampler ClusteredSampling Codec Communication Context Cyclic Data DataError
DataSampler Dataset Dirichlet Ditto Diurnal Domains EarlyStopping Evaluation Experiment FedAU FedAWE
FedAdagrad FedAdam FedAvg FedAvgFT FedAvgM FedBABU FedDecorr FedDyn FedEntOpt FedExP FedGS FedLC FedLESAM
FedNTD FedNova FedPer FedProx FedRS FedRep FedSAM FedSSAR FedSTS FedSTaS FedSampling FedTAN FedVARP FedVLS
FedYogi Federation Fit FitReply Given GloballySharpnessAware Grouped Groups History IID KeepBest
LabelCorrelated LabelCounts MIFA MLflow MOON Markov MeanBySize Method Metric Model ModelRequest MultiLabel
Natural NextToken Objective Partition Parts PerSample Persistent Population PowerLaw PowerOfChoice Predictions
Predictor Privacy Proximal ReBaFL Recipe Regression Reply ReplyRefusedError Request RequestRule RunFolder
SCAFFOLD SFL Schema Segmentation Selection Shards SharpnessAware Simulation SingleClient SizeCorrelated Sizes
SpecError Stratify Targets Task TensorBoard Trace Trained Training Weighted Weights WithMemory
allowed_label_counts allowed_sizes compare decode encode from_arrays from_dataframe handles handles_hop
handles_sum load load_runs numbers plot prepare record reference_runs run search strata_after strata_of sweep
uniforms variants
"""
PUBLIC = NAMES.split()


def test_the_public_names():
    assert fs.__all__ == dir(fs) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_is_there_and_has_a_docstring(name):
    value = getattr(fs, name)
    assert value.__name__ == name
    assert (value.__doc__ or "").strip()


def test_no_module_hides_a_public_name():
    modules = {module.name for module in pkgutil.iter_modules(fs.__path__)}
    assert modules & set(PUBLIC) == set()


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="FedAvgg"):
        fs.FedAvgg  # noqa: B018


def test_docs_examples_and_templates_use_public_names_only():
    templates = Path(fs.__file__).parent / "cli" / "templates"
    folders = [templates, *(ROOT / name for name in ("docs", "examples"))]
    pages = [path for folder in folders for path in folder.rglob("*.*") if path.suffix in (".py", ".md", ".ipynb")]
    pages = [path for path in [*pages, ROOT / "README.md"] if path != ROOT / "docs" / "conf.py"]
    # Figures of the documentation have the colours and axes of all other figures; these modules are for nothing else.
    drawing = r"base import style|reporting\.axes import|reporting\.strata import"
    of_submodules = re.compile(rf"(?:from|import) fedstrata\.(?!{drawing})\w.*")
    found = [(path.name, line) for path in pages for line in of_submodules.findall(path.read_text(encoding="utf-8"))]
    assert found == []


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_importing_fedstrata_does_not_wait_for_pytorch():
    heavy = "{'torch', 'numpy', 'pydantic', 'sklearn', 'matplotlib', 'rich', 'jinja2', 'datasets'}"
    code = f"import sys, fedstrata, fedstrata.cli; print(sorted({heavy} & set(sys.modules)))"
    assert in_a_new_process(code) == "[]"


UNNEEDED = {"sklearn", "scipy", "joblib", "pandas", "pyarrow", "jinja2", "datasets", "ray", "nvflare"}
UNNEEDED |= {"optuna", "tenseal", "sympy", "torch._dynamo"}
"""Modules that take long to import and that a run on digits does not need."""


@pytest.mark.slow
def test_a_run_imports_nothing_for_reports_the_hub_or_a_compiler_and_the_command_run_only_what_it_needs(tmp_path):
    command = ["run", "--quiet", "--json", "--set", "training.rounds=1", "--set", "partition.clients=2"]
    code = (
        "import sys, fedstrata as fs; fs.run(fs.Experiment(training={'rounds': 1}));"
        f"print(sorted({UNNEEDED | {'matplotlib', 'rich'}} & set(sys.modules)));"
        f"from fedstrata.cli import main; main({[*command, '--out', str(tmp_path / 'run')]});"
        f"print(sorted({UNNEEDED | {'rich'}} & set(sys.modules)))"
    )
    without_a_folder, *_, with_a_folder = in_a_new_process(code).splitlines()
    assert (without_a_folder, with_a_folder) == ("[]", "[]")
