"""Units and compose files with the true paths of a site, held against the tools that read them."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pandas as pd
import pytest
from operating import make_federation

from fedstat.errors import PartitionError
from fedstat.federation.message import VERSION
from fedstat.operator.command_line import main
from fedstat.operator.deployment import SBOM, ServiceUnit

RECORDS = pd.DataFrame({"age": [61.0, 47, 55, 70, 39, 58]})


@pytest.fixture
def home(tmp_path):
    make_federation(tmp_path, {"A": RECORDS})
    return tmp_path


@pytest.fixture
def unit(home, capsys):
    capsys.readouterr()
    assert main(["site", "unit", str(home / "A")]) == 0
    return capsys.readouterr().out


def entries(unit):
    lines = [line.partition("=") for line in unit.splitlines() if not line.startswith(("#", "["))]
    return {key: value for key, _, value in lines if key}


def test_a_unit_writes_the_folder_and_the_exchange_alone(home, unit):
    found = entries(unit)
    assert found["ReadWritePaths"].split() == [str(home / "A"), str(home / "study" / "exchange")]
    assert str(home / "A.csv") in found["RequiresMountsFor"] and "A.csv" not in found["ReadWritePaths"]
    assert found["ProtectSystem"] == "strict" and found["NoNewPrivileges"] == "true"
    assert (
        found["RestrictAddressFamilies"] == "AF_UNIX"
    )  # records in a file, questions in a folder: no network
    assert found["ExecStart"] == f"{sys.executable} -m fedstat.operator site serve {home / 'A'}"


def test_the_command_of_a_unit_runs(unit):
    run = subprocess.run([*entries(unit)["ExecStart"].split(), "--once"], timeout=600, capture_output=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_a_unit_is_understood_by_systemd(unit, tmp_path):
    path = tmp_path / "fedstat-a.service"
    path.write_text(unit)
    run = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=120
    )
    reported = [line for line in run.stderr.splitlines() if "fedstat-a" in line]
    assert not reported and run.returncode == 0, run.stderr


def test_a_compose_file_mounts_what_the_site_names(home, capsys, tmp_path):
    yaml = pytest.importorskip("yaml")
    assert main(["site", "compose", str(home / "A"), str(tmp_path / "docker")]) == 0
    service = yaml.safe_load((tmp_path / "docker" / "compose.yaml").read_text())["services"]["a"]
    folder, exchange, records = (str(home / name) for name in ("A", "study/exchange", "A.csv"))
    assert service["volumes"] == [f"{folder}:{folder}", f"{exchange}:{exchange}", f"{records}:{records}:ro"]
    assert service["command"] == ["site", "serve", folder] and service["network_mode"] == "none"
    assert service["healthcheck"]["test"] == ["CMD", "fedstat", "site", "health", folder]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert (
        main(["site", "compose", str(home / "A"), str(tmp_path / "docker")]) == 1
    )  # nothing is written over


@pytest.fixture
def deployed(home, tmp_path, capsys):
    """The files of `site compose`, and what the command prints."""
    capsys.readouterr()
    assert main(["site", "compose", str(home / "A"), str(tmp_path / "docker")]) == 0
    return tmp_path / "docker", capsys.readouterr().err


def check_file(*words):
    """Run a program that examines a file; skip without it."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]}")
    run = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_dockerfile_has_no_complaint_of_hadolint(deployed):
    check_file("hadolint", "--failure-threshold", "info", deployed[0] / "Dockerfile")


def test_a_compose_file_follows_the_published_schema(deployed):
    check_file("check-jsonschema", "--builtin-schema", "vendor.compose-spec", deployed[0] / "compose.yaml")


def test_an_image_is_labeled_lists_its_parts_and_does_not_run_as_root(deployed):
    text = deployed[0].joinpath("Dockerfile").read_text()
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', text))
    about = metadata("fedstat")
    assert (labels["version"], labels["licenses"]) == (VERSION, about["License"])
    assert (labels["title"], labels["description"]) == ("fedstat", about["Summary"])
    base = re.search("FROM (.*)", text)[1]
    assert labels["base.name"].endswith(base)
    # after everything else is installed, and in the layer that removes the tool
    (step,) = [step for step in text.replace("\\\n", " ").splitlines() if "cyclonedx-py" in step]
    assert text.index('pip install --no-cache-dir "/tmp/fedstat') < text.index("cyclonedx-py")
    assert SBOM in step and step.endswith("rm -r /tmp/sbom")
    assert int(re.search(r"^USER (\d+)$", text, re.MULTILINE)[1]) > 0


@pytest.mark.parametrize("command", ["unit", "compose"])
@pytest.mark.parametrize("owner", [0, 1000])
def test_a_service_of_root_is_warned_of(home, tmp_path, capsys, monkeypatch, command, owner):
    stat = Path.stat

    def owned(path, **more):
        found = list(stat(path, **more))
        return os.stat_result([*found[:4], owner, *found[5:]])

    monkeypatch.setattr(Path, "stat", owned)
    given = [str(tmp_path / "into")] if command == "compose" else []
    capsys.readouterr()
    main(["site", command, str(home / "A"), *given])
    assert ("would run as root" in capsys.readouterr().err) is (owner == 0)


def test_a_database_gets_its_variable_or_its_file_and_no_value_is_written(
    home, tmp_path, monkeypatch, capsys
):
    yaml = pytest.importorskip("yaml")
    monkeypatch.setenv("WARD", "postgresql://reader:secret@host/ward")
    path = home / "A" / "site.toml"
    top, _, rest = path.read_text().partition("[data]")
    for place, entry in enumerate(('env = "WARD"', f'file = "{home}/ward.txt"')):
        data = f'[data]\nkind = "sql"\nquery = "SELECT id, age FROM t"\nkey = "id"\n{entry}\n\n[pinned]'
        path.write_text(top + data + rest.partition("[pinned]")[2])
        into = tmp_path / f"docker{place}"
        assert main(["site", "compose", str(home / "A"), str(into)]) == 0, capsys.readouterr().err
        text = (into / "compose.yaml").read_text()
        service = yaml.safe_load(text)["services"]["a"]
        assert "secret" not in text and "network_mode" not in service
        mounted = f"{home}/ward.txt:{home}/ward.txt:ro" in service["volumes"]
        assert (service.get("environment"), mounted) == ((["WARD"], False), (None, True))[place]


def test_a_ledger_without_a_name_is_named_by_its_number(home, monkeypatch):
    def nameless(path):
        raise KeyError("uid")

    monkeypatch.setattr(Path, "owner", nameless)
    unit = ServiceUnit("a", home / "A", ("site", "serve"), (home / "A",)).unit()
    assert entries(unit)["User"] == str(os.getuid())


def test_a_dockerfile_has_instructions_that_docker_knows(home, tmp_path, capsys):
    assert main(["site", "compose", str(home / "A"), str(tmp_path / "docker")]) == 0
    text = (tmp_path / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = text.splitlines()
    words = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert words == ["FROM", "LABEL", "COPY", "RUN", "RUN", "USER", "ENV", "ENTRYPOINT"]
    assert json.loads(lines[-1].removeprefix("ENTRYPOINT ")) == ["fedstat"]
    copied = next(line for line in lines if line.startswith("COPY")).split()[1]
    assert re.fullmatch(r"fedstat-[0-9.a-z+]+-py3-none-any\.whl", copied)
    assert copied in next(line for line in lines if line.startswith("RUN pip install"))


def test_a_coordinator_over_a_folder_has_nothing_to_run(home, capsys):
    assert main(["federation", "unit", str(home / "study")]) == 1
    assert "needs no server" in capsys.readouterr().err


def test_a_path_that_a_unit_would_take_apart_is_refused(home, tmp_path):
    for name in ("two words", "a%h", "x:ro", "a\nUser=root"):
        with pytest.raises(PartitionError, match="letters, digits"):
            ServiceUnit("a", home / "A", ("site", "serve"), (tmp_path / name,)).unit()


def manifests(home, capsys):
    """The objects of the manifests by kind, each valid by the published schema of Kubernetes."""
    yaml = pytest.importorskip("yaml")
    published = pytest.importorskip("kubernetes_validate")
    capsys.readouterr()
    assert main(["site", "kubernetes", str(home / "A"), "--image", "registry.example/fedstat@sha256:0"]) == 0
    text = capsys.readouterr().out
    found = list(yaml.safe_load_all(text))
    for one in found:
        published.validate(one, published.latest_version(), strict=True)
    with pytest.raises(published.ValidationError):  # the schema is that of the object, and is strict
        published.validate(found[0] | {"unknown": 1}, published.latest_version(), strict=True)
    return {one["kind"]: one for one in found}, text


def test_manifests_are_valid_and_a_pod_has_no_rights_that_it_does_not_need(home, capsys):
    found, _ = manifests(home, capsys)
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    assert found["StatefulSet"]["spec"]["replicas"] == 1 and pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    (unpack,), (site,) = pod["initContainers"], pod["containers"]
    for container in (unpack, site):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True and context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False
    # records in a file, requests in a folder: no network
    policy = found["NetworkPolicy"]["spec"]
    assert (policy["ingress"], policy["egress"]) == ([], [])
    assert policy["podSelector"]["matchLabels"].items() <= found["StatefulSet"]["metadata"]["labels"].items()
    assert site["args"] == ["site", "serve", str(home / "A")]
    assert site["readinessProbe"]["exec"]["command"] == ["fedstat", "site", "health", str(home / "A")]
    # every volume is mounted, and every mount is a volume
    volumes = {one["name"] for one in pod["volumes"]}
    mounted = {mount["name"] for container in (unpack, site) for mount in container["volumeMounts"]}
    assert volumes == mounted
    claimed = [
        one["persistentVolumeClaim"]["claimName"]
        for one in pod["volumes"]
        if len(one) > 1 and "persistentVolumeClaim" in one
    ]
    assert found["PersistentVolumeClaim"]["metadata"]["name"] in claimed


def test_the_first_start_unpacks_the_folder_and_later_ones_keep_it(home, capsys, tmp_path):
    """The command of the manifests, run on this machine with an archive of the folder."""
    found, _ = manifests(home, capsys)
    (unpack,) = found["StatefulSet"]["spec"]["template"]["spec"]["initContainers"]
    (archive := tmp_path / "given").mkdir()
    subprocess.run(["tar", "-czf", archive / "folder.tar.gz", "-C", home, "A"], check=True)
    command = [word.replace("/run/fedstat/folder", str(archive)) for word in unpack["command"]]
    before = {path.name: path.read_bytes() for path in (home / "A").iterdir() if path.is_file()}
    (home / "A" / "ledger.jsonl").write_bytes(before["ledger.jsonl"] + b"later")
    subprocess.run(command, check=True)
    assert (home / "A" / "ledger.jsonl").read_bytes().endswith(b"later")
    shutil.rmtree(home / "A")
    subprocess.run(command, check=True)
    assert {path.name: path.read_bytes() for path in (home / "A").iterdir() if path.is_file()} == before
    assert (home / "A").stat().st_mode & 0o077 == 0 and (home / "A/identity.json").stat().st_mode & 0o077 == 0
    assert main(["site", "check", str(home / "A")]) in (0, 1)


def test_places_of_other_machines_are_claims_at_their_paths(home, capsys):
    path = home / "A" / "site.toml"
    text = re.sub(r'(?m)^exchange = ".*"', 'exchange = "/mnt/share/study"', path.read_text())
    path.write_text(re.sub(r'(?m)^path = ".*"', 'path = "/data/ward/records.csv"', text))
    pod = manifests(home, capsys)[0]["StatefulSet"]["spec"]["template"]["spec"]
    mounts = {one["mountPath"]: one for one in pod["containers"][0]["volumeMounts"]}
    assert mounts["/data/ward"]["readOnly"] is True and "readOnly" not in mounts["/mnt/share/study"]
    claims = {one["name"]: one.get("persistentVolumeClaim", {}) for one in pod["volumes"]}
    assert claims[mounts["/mnt/share/study"]["name"]]["claimName"] == "a-exchange-1"
    assert claims[mounts["/data/ward"]["name"]] == {"claimName": "a-records-2", "readOnly": True}
    # the start writes into no records
    assert "/data/ward" not in {one["mountPath"] for one in pod["initContainers"][0]["volumeMounts"]}


def test_secrets_are_mounted_and_copied_for_the_site_alone(home, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("WARD", "postgresql://reader:secret@host/ward")
    path = home / "A" / "site.toml"
    top, _, rest = path.read_text().partition("[data]")
    for entry in ('env = "WARD"', 'file = "/etc/ward/address.txt"'):
        data = f'[data]\nkind = "sql"\nquery = "SELECT id, age FROM t"\nkey = "id"\n{entry}\n\n[pinned]'
        path.write_text(top + data + rest.partition("[pinned]")[2])
        found, text = manifests(home, capsys)
        assert "reader" not in text and found["NetworkPolicy"]["spec"]["egress"] == [{}]
        pod = found["StatefulSet"]["spec"]["template"]["spec"]
        (site,), (unpack,) = pod["containers"], pod["initContainers"]
        if "env" in entry:
            key = {"name": "a-secrets", "key": "WARD"}
            assert site["env"] == [{"name": "WARD", "valueFrom": {"secretKeyRef": key}}]
        else:
            assert (
                "install -m 600 /run/fedstat/secrets/address.txt /etc/ward/address.txt"
                in unpack["command"][2]
            )
            (private,) = [one for one in pod["volumes"] if one["name"].startswith("private")]
            assert private["emptyDir"] == {"medium": "Memory"}
            assert {"name": private["name"], "mountPath": "/etc/ward"} in site["volumeMounts"]
