"""The Kubernetes manifests: valid by the schemas of Kubernetes and of the Prometheus operator, and least privilege."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.config import ConfigError, parse_config

DEPLOY = Path(__file__).parents[2] / "deploy"
SETS = ("engine", "vllm")
USER = 65532


def files_of(name: str) -> list[Path]:
    kustomization = yaml.safe_load((DEPLOY / "kubernetes" / name / "kustomization.yaml").read_text())
    return [DEPLOY / "kubernetes" / name / file for file in kustomization["resources"]]


def documents(name: str) -> dict[str, dict[str, Any]]:
    found = [document for file in files_of(name) for document in yaml.safe_load_all(file.read_text())]
    return {document["kind"]: document for document in found}


def validate(document: dict[str, Any]) -> None:
    """Raises the library's error for a document that its schema refuses."""
    if document["kind"] == "ServiceMonitor":
        jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed (the dev extra)")
        jsonschema.validate(document, json.loads((DEPLOY / "kubernetes/schemas/servicemonitor.json").read_text()))
        return
    library = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed (the dev extra)")
    library.validate(document, library.latest_version(), strict=True)


@pytest.mark.parametrize("name", SETS)
def test_every_document_is_valid(name: str) -> None:
    found = documents(name)
    assert set(found) == {
        "Namespace", "ServiceAccount", "PersistentVolumeClaim", "Deployment", "Service", "ServiceMonitor",
        "NetworkPolicy",
    }  # fmt: skip
    for document in found.values():
        validate(document)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        (
            "Deployment",
            ("spec", "template", "spec", "containers", 0, "securityContext", "readonlyRootFilesystem"),
            True,
        ),
        ("Deployment", ("spec", "replicas"), "one"),
        ("NetworkPolicy", ("spec", "ingres"), []),
        ("ServiceMonitor", ("spec", "endpoints", 0, "intervall"), "15s"),
        ("ServiceMonitor", ("spec", "endpoints", 0, "interval"), "15"),
    ],
)
def test_the_schemas_refuse_what_is_misspelt(kind: str, path: tuple[str | int, ...], value: object) -> None:
    document = copy.deepcopy(documents("engine")[kind])
    validate(document)
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(Exception, match=value if value in ("one", "15") else str(path[-1])):
        validate(document)


def containers(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    pod = documents(name)["Deployment"]["spec"]["template"]["spec"]
    for container in [*pod["initContainers"], *pod["containers"]]:
        yield pod, container


@pytest.mark.parametrize("name", SETS)
def test_least_privilege(name: str) -> None:
    for pod, container in containers(name):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == USER
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        kinds = {key for volume in pod["volumes"] for key in volume if key != "name"}
        assert kinds <= {"emptyDir", "configMap", "persistentVolumeClaim"}
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert "/models" not in writable
    policy = documents(name)["NetworkPolicy"]["spec"]
    assert (policy["policyTypes"], policy["egress"]) == (["Ingress", "Egress"], [])
    labels = documents(name)["Namespace"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("name", SETS)
def test_names_belong_together(name: str) -> None:
    found = documents(name)
    pod = found["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    for selector in (
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    assert (
        found["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items()
        <= found["Service"]["metadata"]["labels"].items()
    )
    ports = {port["name"] for _, container in containers(name) for port in container["ports"]}
    assert {port["targetPort"] for port in found["Service"]["spec"]["ports"]} <= ports
    assert {end["port"] for end in found["ServiceMonitor"]["spec"]["endpoints"]} <= {
        port["name"] for port in found["Service"]["spec"]["ports"]
    }
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    for _, container in containers(name):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["port"] in {port["name"] for port in container["ports"]}


@pytest.mark.parametrize("name", SETS)
def test_the_daemons_configuration_is_one(name: str) -> None:
    text = (DEPLOY / "kubernetes" / name / "autotune.yaml").read_text()
    try:
        config = parse_config(text)
    except ConfigError as error:
        pytest.fail(str(error))
    assert config.admin.host == "0.0.0.0"  # pods have addresses of their own; the network policy says who may come
    assert (config.mode == "active") == (name == "engine")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("name", SETS)
def test_kustomize_builds_them(name: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / name)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert {document["kind"] for document in built} == {*documents(name), "ConfigMap"}
    namespaces = {document["metadata"].get("namespace") for document in built if document["kind"] != "Namespace"}
    assert len(namespaces) == 1
