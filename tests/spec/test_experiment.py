from __future__ import annotations

import pytest

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.data.partitions.base import PARTITIONS
from fedstrata.federation.availability import AVAILABILITIES
from fedstrata.methods.base import METHODS
from fedstrata.spec.experiment import (
    LARGEST_SEED,
    Experiment,
    apply_override,
    line_of,
    parse_toml,
    read_table,
    variants,
)

TEXT = """seed = 4  # of everything

[data]
name = "digits"

[partition]
name = "dirichlet"
alpha = 0.1
clients = 20

[method]
name = "fedavg"
objective = { name = "fedprox", mu = 0.5 }

[training]
rounds = 3
"""


def write(path, text=TEXT):
    path = path / "spec.toml"
    path.write_text(text)
    return path


def test_a_file_a_table_and_python_give_the_same_experiment(tmp_path):
    from fedstrata.objectives.fedprox import Proximal

    spec = fs.Experiment(
        seed=4,
        data=fs.Data(name="digits"),
        partition=fs.Dirichlet(alpha=0.1, clients=20),
        method=fs.FedAvg(objective=Proximal(mu=0.5)),
        training=fs.Training(rounds=3),
    )
    assert Experiment.from_toml(write(tmp_path)) == spec
    assert Experiment.from_table(read_table(write(tmp_path))) == spec
    assert Experiment.from_table(spec.to_spec()) == spec


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("seed = true", "seed"),
        ("[training]\nlr = true", "training.lr"),
        ("[training]\nclients_per_round = true", "training.clients_per_round"),
        ("[model]\nname = 'mlp'\nhidden = [8, true]", "model.hidden"),
        ("[method]\nname = 'fedprox'\nmu = false", "method.mu"),
        ("[availability]\nname = 'groups'\ngroups = [{ clients = true, p = 0.5 }]", "availability.groups.0.clients"),
    ],
)
def test_a_truth_value_is_not_a_number(tmp_path, text, key):
    with pytest.raises(SpecError, match=f"{key} = .*(True|False).*: must be a number, not true or false"):
        Experiment.from_toml(write(tmp_path, text))


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = write(tmp_path, "\ufeffseed = 3\n[training]\nrounds = 2\n")
    assert Experiment.from_toml(path).seed == 3
    with pytest.raises(SpecError, match=r"seed = -1 \(.*spec\.toml, line 1\): "):
        Experiment.from_toml(write(tmp_path, "\ufeffseed = -1\n"))


def test_what_is_written_reads_back(tmp_path):
    spec = Experiment.from_toml(write(tmp_path))
    (tmp_path / "again.toml").write_text(spec.to_toml())
    again = Experiment.from_toml(tmp_path / "again.toml")
    assert again == spec
    assert again.to_toml() == spec.to_toml()


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_round_trips(tmp_path, method):
    spec = Experiment(method=method)
    assert Experiment.from_toml(write(tmp_path, spec.to_toml())) == spec


NEEDS = {
    "given": {"indices": [[0, 1], [2]]},
    "groups": {"groups": [{"clients": 2, "classes": 3}]},
    "single-client": {"of": "natural", "only": 3},
}


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_every_partition_round_trips(tmp_path, name):
    spec = Experiment(partition={"name": name, **NEEDS.get(name, {})})
    assert Experiment.from_toml(write(tmp_path, spec.to_toml())) == spec


@pytest.mark.parametrize("name", list(AVAILABILITIES))
def test_every_availability_round_trips(tmp_path, name):
    (tmp_path / "trace.csv").write_text("client,first,last\n0,1,2\n")
    needs = {"groups": {"groups": [{"clients": 2, "p": 0.5}]}, "trace": {"file": str(tmp_path / "trace.csv")}}
    spec = Experiment(availability={"name": name, "deadline": 2.0, **needs.get(name, {})})
    again = Experiment.from_toml(write(tmp_path, spec.to_toml()))
    assert again.to_toml() == spec.to_toml()
    assert type(again.availability) is type(spec.availability)


def test_several_availabilities_round_trip(tmp_path):
    spec = Experiment(availability=["label-correlated", {"name": "markov", "online_rounds": 3.0}])
    assert spec.to_toml().count("[[availability]]") == 2
    again = Experiment.from_toml(write(tmp_path, spec.to_toml()))
    assert again == spec
    assert again.to_toml() == spec.to_toml()
    assert spec.replace(seed=1).availability == spec.availability
    assert spec.replace(availability={"name": "cyclic"}).availability.name == "cyclic"


def test_an_error_in_a_list_names_the_line_of_its_table(tmp_path):
    text = "[[availability]]\nname = 'markov'\n[[availability]]\nname = 'cyclic'\np = 2\n"
    with pytest.raises(SpecError, match=r"availability\.1\.p = 2 \(.*, line 5\): "):
        Experiment.from_toml(write(tmp_path, text))
    assert [line_of(text, key) for key in ("availability", "availability.0", "availability.1.q")] == [1, 1, 3]


def test_a_section_without_a_name_is_of_the_default_kind():
    spec = Experiment.from_table({"partition": {"alpha": 3.0}, "method": {}, "availability": {}})
    assert spec.partition == fs.Dirichlet(alpha=3.0)
    assert (spec.method.name, spec.availability.name, spec.model.name) == ("fedavg", "always", "mlp")


def test_overrides():
    table = {"method": "scaffold", "training": {"rounds": 3}}
    for override in ("training.rounds=9", "partition.name=iid", "method.objective.name = fedprox", "seed=2"):
        apply_override(table, override)
    apply_override(table, "evaluation.targets=[0.5, 0.6]")
    apply_override(table, 'data.name="a=b"')
    assert table == {
        "method": {"name": "scaffold", "objective": {"name": "fedprox"}},
        "training": {"rounds": 9},
        "partition": {"name": "iid"},
        "seed": 2,
        "evaluation": {"targets": [0.5, 0.6]},
        "data": {"name": "a=b"},
    }


@pytest.mark.parametrize("override", ["training.rounds", "=3", "training.=3", ".rounds=3", "seed.x=1"])
def test_overrides_that_say_nothing(override):
    with pytest.raises(SpecError, match="--set = "):
        apply_override({"seed": 1}, override)


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("seed", 1),
        ("partition.alpha", 8),
        ("partition.clients", 9),
        ("method.objective.mu", 13),
        ("training.rounds", 16),
        ("training.lr", 15),  # not there: the section
        ("model.name", None),
    ],
)
def test_lines_are_found(key, line):
    assert line_of(TEXT, key) == line


def test_an_error_names_file_and_line(tmp_path):
    path = write(tmp_path, TEXT.replace("alpha", "alfa"))
    with pytest.raises(SpecError) as caught:
        Experiment.from_toml(path)
    assert (caught.value.key, caught.value.value) == ("partition.alfa", 0.1)
    assert f"partition.alfa = 0.1 ({path}, line 8): is not a known key" in str(caught.value)
    path.write_text("seed = -1")
    with pytest.raises(SpecError) as caught:
        Experiment.from_toml(path)
    assert str(caught.value).startswith(f"seed = -1 ({path}, line 1): ")


def test_files_that_are_none(tmp_path):
    with pytest.raises(SpecError, match=r"missing\.toml': the file does not exist"):
        Experiment.from_toml(tmp_path / "missing.toml")
    with pytest.raises(SpecError, match=r"is not valid TOML: .*line 1"):
        Experiment.from_toml(write(tmp_path, "[method\n"))
    (tmp_path / "spec.toml").write_bytes(b"seed = 1 # \xff\n")
    with pytest.raises(SpecError, match=r"cannot be read \('utf-8' codec"):
        Experiment.from_toml(tmp_path / "spec.toml")


def test_variants_lay_their_sections_over_the_spec():
    table = {
        "method": {"name": "fedavg", "objective": "fedprox"},
        "partition": {"name": "dirichlet", "alpha": 0.1, "clients": 7},
        "compare": {
            "steep": {"method": "fedavg", "training": {"lr": 1.0}, "partition": {"alpha": 5.0}},
            "iid": {"method": "scaffold", "partition": {"name": "iid"}},
        },
    }
    found = variants(table)
    assert list(found) == ["steep", "iid"]
    assert found["steep"].partition == fs.Dirichlet(alpha=5.0, clients=7)
    assert found["steep"].method.objective.name == "fedprox"
    assert found["steep"].training.lr == 1.0
    assert found["iid"].partition == fs.IID()
    assert found["iid"].method == fs.SCAFFOLD()
    assert list(variants(table, ["stratify", "iid"])) == ["stratify", "iid"]


@pytest.mark.parametrize(
    ("labels", "overlays", "message"),
    [
        (
            ["fedavgg"],
            {},
            r"--methods = 'fedavgg': is not a known method or label; did you mean 'fedavg'\? Use one or more of: .*",
        ),
        ([], {}, "--methods: is required"),
        (["a"], {"a": {"method": "fedavg", "training": {"lr": -1}}}, r"compare\.a\.training\.lr = -1"),
        (["a"], {"a": {"method": "fedavg", "trainin": {}}}, r"compare\.a\.trainin = \{\}: is not a known key"),
    ],
)
def test_variants_that_are_wrong(labels, overlays, message):
    with pytest.raises(SpecError, match=message):
        variants({"compare": overlays}, labels)


COMPARED = {
    "seed": 7,
    "method": {"name": "rebafl", "mu": 0.2},
    "training": {"rounds": 9},
    "compare": {"fedavg": {}, "fedprox": {"training": {"rounds": 4}}, "low": {"training": {"lr": 0.01}}},
}


def test_a_label_that_is_no_method_is_a_variant_of_the_specs():
    found = variants(COMPARED)
    assert found["low"].method == fs.ReBaFL(mu=0.2)
    assert found["low"].training.lr == 0.01
    with pytest.raises(SpecError, match=r"compare\.low\.method\.name: is not set"):
        variants({"compare": {"low": {}}})


def test_overrides_win_over_what_a_label_says():
    found = variants(COMPARED, overrides=["training.rounds=2", "seed=3"])
    assert {spec.training.rounds for spec in found.values()} == {2}
    assert {spec.seed for spec in found.values()} == {3}
    steps = variants({**COMPARED, "training": {"local_epochs": 2}}, overrides=["training.local_steps=5"])
    assert steps["fedavg"].training.local_steps == 5


def test_an_override_of_a_method_is_for_those_that_have_it():
    found = variants(COMPARED, overrides=["method.mu=0.7"])
    assert found["low"].method.mu == found["fedprox"].method.mu == 0.7
    assert found["fedavg"].method == fs.FedAvg()
    with pytest.raises(SpecError, match=r"--set = 'method.alpha=1': none of the methods \(fedavg, .*has this setting"):
        variants(COMPARED, overrides=["method.alpha=1"])


def test_an_override_of_another_kind_is_not_for_a_label_that_changed_it():
    table = {"compare": {"fedavg": {}, "scaffold": {"partition": {"name": "iid"}}}}
    found = variants(table, overrides=["partition.alpha=0.3"])
    assert found["fedavg"].partition.alpha == 0.3
    assert found["scaffold"].partition == fs.IID()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rounds": 3}, r"rounds = 3: is not a known key; did you mean 'training\.rounds'\? Use one of: .*"),
        (
            {"availability": {"p": 0.5}},
            r"availability\.p = 0\.5: is not a known key. .*\. .* so 'always' is used\. Set 'name'\.",
        ),
        ({"model": {"name": "mlp", "hidden": 50}}, r"model\.hidden = 50: must be a list. Use, for example, \[1, 2\]"),
        ({"method": {"name": "fedsampling", "strata": 3}}, r"method\.strata = 3: is not a known key"),
        (
            {"model": {"name": "cnn64", "channels": [3]}},
            r"model\.channels = \[3\]: is not a known key\. The key 'channels' belongs to cnn, but this model is cnn64",
        ),
        (
            {"partition": {"name": "iid", "alpha": 1}},
            r"is not a known key\. The key 'alpha' belongs to dirichlet, domain, but this par",
        ),
        ({"partition": {"name": "Dirichlet"}}, r"did you mean 'dirichlet'"),
    ],
)
def test_errors_say_what_was_probably_meant(table, message):
    with pytest.raises(SpecError, match=message):
        fs.Experiment.from_table(table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 1500 + "]" * 1500, "nested too deeply"),
        ("a = " + "{a=" * 1500 + "1" + "}" * 1500, "nested too deeply"),
        ("seed = " + "9" * 4301, "is not valid TOML: an integer has too many digits"),
        ("seed = \x00", "is not valid TOML"),
    ],
    ids=["lists", "tables", "digits", "null"],
)
def test_toml_that_python_trips_over_is_refused(tmp_path, text, message):
    with pytest.raises(SpecError, match=message) as caught:
        read_table(write(tmp_path, text))
    assert caught.value.key == "spec"


@pytest.mark.slow
def test_arguments_that_toml_cannot_hold_are_refused():
    table = {"model": {"name": "torch.nn:Linear", "arguments": parse_toml(".".join(["a"] * 5000) + " = 1")}}
    with pytest.raises(SpecError, match="spec: tables or lists are nested too deeply"):
        Experiment.from_table(table).to_toml()


def test_a_path_with_a_null_byte_is_none():
    with pytest.raises(SpecError, match=r"spec = 'a\\x00b': cannot be read \(embedded null byte\)"):
        read_table("a\0b")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (".".join(["a"] * 5000) + "=1", r"a = \(dict too large to show\): is not a known key"),
        ("seed=" + "9" * 5000, "seed = '999.*is too large"),
        ("seed=0x" + "f" * 9000, r"seed = \(int too large to show\): must be less than or equal to"),
        ("seed=" + "[" * 5000, r"seed = '\[\[.*integer"),
        ("training.lr=" + "[" * 200 + "]" * 200, r"training.lr = \[\[.*number"),
    ],
    ids=["dots", "digits", "hexadecimal", "open", "deep"],
)
def test_overrides_that_python_trips_over_are_refused(tmp_path, override, message):
    with pytest.raises(SpecError, match=message):
        Experiment.from_toml(write(tmp_path, ""), [override])


def test_the_largest_seed_runs_and_reads_back():
    spec = Experiment(seed=LARGEST_SEED)
    assert Experiment.from_table(parse_toml(spec.to_toml())) == spec
    assert spec.data.load(spec.seed).train_size == 1437


def test_a_label_whose_methods_name_is_no_text():
    with pytest.raises(SpecError, match=r"compare.a.method.name = 5: must be the name of a method\."):
        variants({"compare": {"a": {"method": {"name": 5}}}})


def test_the_file_of_a_partition_is_looked_for_beside_the_spec(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "p.npz").write_bytes(fs.Given(indices=[[0], [1]]).packed())
    text = '[partition]\nname = "given"\nfile = "p.npz"\n[compare.a.partition]\nname = "given"\nfile = "p.npz"\n'
    path = write(tmp_path / "there", text)
    assert Experiment.from_toml(path).partition == fs.Given(indices=[[0], [1]])
    assert variants(read_table(path) | {"method": "fedavg"})["a"].partition == fs.Given(indices=[[0], [1]])
    assert Experiment.from_toml(path, ["partition.indices=[[1], [0], [2]]"]).partition.clients == 3
    (tmp_path / "there" / "p.npz").rename(tmp_path / "p.npz")
    monkeypatch.chdir(tmp_path)
    assert Experiment.from_toml(path).partition == fs.Given(indices=[[0], [1]])
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(SpecError, match=r"partition\.file = 'p\.npz' \(.*spec\.toml, line 3\): there is no file "):
        Experiment.from_toml(path)


def test_a_setting_of_the_kind_that_was_just_named():
    overrides = ["availability=bernoulli", "availability.p=0.2", "partition.name=classes", "partition.per_client=3"]
    found = variants({"compare": {"fedavg": {}, "scaffold": {"training": {"lr": 0.5}}}}, overrides=overrides)
    assert {spec.availability.p for spec in found.values()} == {0.2}
    assert {spec.partition.per_client for spec in found.values()} == {3}


def test_replacing_settings_checks_them_and_keeps_the_others():
    spec = Experiment.from_table({"method": {"name": "fedprox", "mu": 0.2}, "training": {"rounds": 7, "lr": 0.2}})
    other = spec.replace(training={"rounds": 3}, method={"mu": 0.5}, partition=fs.IID(clients=4))
    assert (other.training.rounds, other.training.lr, other.method.mu) == (3, 0.2, 0.5)
    assert other == Experiment.from_table(other.to_spec())
    assert spec.training.rounds == 7
    with pytest.raises(SpecError, match=r"training\.round = 3: is not a known key"):
        spec.replace(training={"round": 3})


def test_a_label_is_the_name_of_a_folder_on_every_system():
    table = {"compare": {}, "training": {"rounds": 1}}
    assert list(variants(table, ["fedstrata.methods.scaffold:SCAFFOLD"])) == ["fedstrata.methods.scaffold.SCAFFOLD"]
