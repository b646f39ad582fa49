"""The files of deploy/, by the tools that know them: hadolint, kustomize, the schemas of compose and Kubernetes."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.prometheus import ROOT
from tuneloop.shared.settings.loader import read_settings

DEPLOY = ROOT / "deploy"
IMAGES = sorted((DEPLOY / "images").glob("*.Dockerfile"))
COMPOSE = [DEPLOY / "compose" / name for name in ("compose.yaml", "compose.gpu.yaml")]
OVERLAYS = ("base", "kuberay")

#: What is made by hand before: docs/several_machines.md.
MADE_BY_HAND = {("Secret", "tuneloop-secrets"), ("Secret", "tuneloop-ray")}

Resource = dict[str, Any]


def said(program: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """What a program of the virtual environment says."""
    command = [str(Path(sys.executable).with_name(program)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_hadolint_finds_nothing() -> None:
    done = said("hadolint", "--no-color", *IMAGES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp\n")
    assert "DL3006" in said("hadolint", "--no-color", tmp_path / "Dockerfile").stdout


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_what_an_image_copies_and_installs_is_there(image: Path) -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / each).exists() for each in let_in)
    text = image.read_text()
    for source in re.findall(r"^COPY (\S+) \S+$", text, re.MULTILINE):
        assert source == "." or source in let_in
    for file in re.findall(r"-[cr] (\S+\.txt)", text):
        assert any(file == each or file.startswith(f"{each}/") for each in let_in)
    for folder, extras in re.findall(r'[ "](\.|\./runner)(?:\[([a-z,]+)\])?(?=[" ])', text.partition("pip install")[2]):
        project = (ROOT / folder / "pyproject.toml").read_text()
        for extra in filter(None, extras.split(",")):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), (folder, extra)
    assert re.findall(r"^USER (\d+)$", text, re.MULTILINE)[-1] == "10001"


def test_all_packages_are_let_into_the_images() -> None:
    ignored = (ROOT / ".dockerignore").read_text()
    for needed in ("cli", "explorer", "migrations", "runner", "shared", "trainer", "pyproject.toml", "README.md"):
        assert f"!{needed}\n" in ignored


def test_compose_files_are_as_compose_wants_them() -> None:
    done = said("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *COMPOSE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_compose_file_that_is_wrong_would_be_found(tmp_path: Path) -> None:
    wrong = COMPOSE[0].read_text().replace("stop_grace_period: 90s", "stop_grace: 90s")
    (tmp_path / "compose.yaml").write_text(wrong)
    assert (
        said("check-jsonschema", "--builtin-schema", "vendor.compose-spec", tmp_path / "compose.yaml").returncode == 1
    )


def test_what_compose_names_is_there() -> None:
    whole = yaml.safe_load(COMPOSE[0].read_text())
    over = yaml.safe_load(COMPOSE[1].read_text())
    assert set(over["services"]) <= set(whole["services"])
    for service in [*whole["services"].values(), *over["services"].values()]:
        if "dockerfile" in service.get("build", {}):
            assert (ROOT / service["build"]["dockerfile"]).is_file()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in whole["volumes"] or source.startswith("$") or (COMPOSE[0].parent / source).exists(), volume
        assert set(service.get("depends_on", {})) <= set(whole["services"])
    example = (DEPLOY / "compose" / ".env.example").read_text()
    wanted = set(re.findall(r"\$\{([A-Z_]+)", COMPOSE[0].read_text()))
    assert wanted == set(re.findall(r"^([A-Z_]+)=", example, re.MULTILINE))


def test_a_volume_belongs_to_the_user_of_whoever_mounts_it() -> None:
    """Docker gives an empty volume the owner of the image's folder: root, if there is none."""
    services = yaml.safe_load(COMPOSE[0].read_text())["services"]
    image_of = {"setup": services["explorer"], "explorer": services["explorer"], "trainer": services["trainer"]}
    for name, image in image_of.items():
        text = (ROOT / image["build"]["dockerfile"]).read_text()
        [made] = re.findall(r"install -d -o tuneloop -g tuneloop (.+)$", text, re.MULTILINE)
        mounted = [volume.split(":") for volume in services[name]["volumes"]]
        assert {place[1] for place in mounted if re.fullmatch(r"[a-z-]+", place[0])} <= set(made.split()), name


def test_nothing_of_compose_listens_beyond_this_machine() -> None:
    services = yaml.safe_load(COMPOSE[0].read_text())["services"].values()
    assert all(port.startswith("127.0.0.1:") for service in services for port in service.get("ports", ()))


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("**/tuneloop.yaml")), ids=lambda path: path.parent.name)
@pytest.mark.parametrize("mode", ["serve", "train"])
def test_settings_are_right_for_both_services(file: Path, mode: str) -> None:
    one_gpu = {"TUNELOOP__CLUSTER__NODE_NUM": "1", "TUNELOOP__CLUSTER__GPU_PER_NODE": "1"}
    alone = one_gpu if (file.parent.name, mode) == ("kuberay", "train") else {}
    read = read_settings(file, [f"mode={mode}"], environment=alone)
    assert read.settings is not None, read


# Kubernetes.


def rendered(overlay: str) -> list[Resource]:
    """What `kubectl apply -k` would apply."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            done = subprocess.run(
                [*command, DEPLOY / "kubernetes" / overlay], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr
            return [each for each in yaml.safe_load_all(done.stdout) if each]
    pytest.skip("NEITHER kustomize NOR kubectl IS INSTALLED: deploy/kubernetes is not tested")


def pods(resource: Resource) -> Iterator[dict[str, Any]]:
    """The templates of the pods that a resource makes."""
    spec = resource.get("spec", {})
    for part in (spec, spec.get("headGroupSpec", {}), *spec.get("workerGroupSpecs", ())):
        if "template" in part:
            yield part["template"]


def names(value: Any, claims: set[str]) -> Iterator[tuple[str, str]]:
    """The resources that a pod's template names, by kind."""
    for volume in value["spec"].get("volumes", ()):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    volumes = {volume["name"] for volume in value["spec"].get("volumes", ())} | claims
    for container in value["spec"]["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        for source in container.get("envFrom", ()):
            yield "Secret", source["secretRef"]["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_takes_every_resource(overlay: str) -> None:
    found = rendered(overlay)
    for resource in found:
        if resource["kind"] == "RayCluster":  # Kubernetes knows no such kind, but its pods
            for template in pods(resource):
                kubernetes_validate.validate(
                    {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template},
                    "1.32",
                    strict=True,
                )
        else:
            kubernetes_validate.validate(resource, "1.32", strict=True)
    assert len(found) >= 10


def test_a_resource_that_is_wrong_would_be_found() -> None:
    [trainer] = [each for each in rendered("base") if each["kind"] == "Deployment"]
    trainer["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(trainer, "1.32", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_a_resource_names_is_there(overlay: str) -> None:
    found = rendered(overlay)
    there = {(each["kind"], each["metadata"]["name"]) for each in found} | MADE_BY_HAND
    for resource in found:
        claims = {each["metadata"]["name"] for each in resource.get("spec", {}).get("volumeClaimTemplates", ())}
        assert {name for template in pods(resource) for name in names(template, claims)} <= there
    labels = [template["metadata"]["labels"].items() for each in found for template in pods(each)]
    for resource in found:
        if resource["kind"] in {"Service", "PodDisruptionBudget"}:
            spec = resource["spec"]["selector"]
            selector = spec.get("matchLabels", spec)
            assert any(selector.items() <= each for each in labels), resource["metadata"]["name"]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a selector is one of pods with these labels."""
    alike = selector.get("matchLabels", {}).items() <= labels.items()
    return alike and all(labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ()))


def ways(policies: list[Resource], labels: dict[str, str], direction: str) -> list[dict[str, Any]]:
    """What the network policies that select a pod let out of it (`egress`), or in."""
    specs = [each["spec"] for each in policies if direction.capitalize() in each["spec"]["policyTypes"]]
    return [way for spec in specs if selects(spec["podSelector"], labels) for way in spec.get(direction, ())]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_may_ask_for_names_and_rays_talk_to_each_other(overlay: str) -> None:
    found = rendered(overlay)
    policies = [each for each in found if each["kind"] == "NetworkPolicy"]
    for labels in (template["metadata"]["labels"] for each in found for template in pods(each)):
        out = ways(policies, labels, "egress")
        assert any({"protocol": "UDP", "port": 53} in way.get("ports", ()) for way in out), labels
        if "ray.io/cluster" in labels:
            rays = [{"podSelector": {"matchLabels": {"ray.io/cluster": labels["ray.io/cluster"]}}}]
            assert {"to": rays} in out
            assert {"from": rays} in ways(policies, labels, "ingress")


def test_every_container_of_the_ray_cluster_shows_its_token() -> None:
    [cluster] = [each for each in rendered("kuberay") if each["kind"] == "RayCluster"]
    containers = [container for template in pods(cluster) for container in template["spec"]["containers"]]
    assert [each["name"] for each in containers] == ["ray-head", "explorer", "ray-worker"]
    assert all({"secretRef": {"name": "tuneloop-ray"}} in each["envFrom"] for each in containers)
    [made] = re.findall(
        r"create secret generic tuneloop-ray ((?:.*\\\n)*.*)", (ROOT / "docs/several_machines.md").read_text()
    )
    assert set(re.findall(r"--from-literal=(\w+)=", made)) == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}


def test_explorers_believe_their_proxy_that_it_has_tls() -> None:
    found = [template for overlay in OVERLAYS for each in rendered(overlay) for template in pods(each)]
    containers = [container for template in found for container in template["spec"]["containers"]]
    explorers = [each for each in containers if each["name"] == "explorer"]
    assert [each["env"] for each in explorers] == [[{"name": "FORWARDED_ALLOW_IPS", "value": "*"}]] * len(OVERLAYS)
    in_compose = yaml.safe_load(COMPOSE[0].read_text())["services"]["explorer"]["environment"]
    assert in_compose["FORWARDED_ALLOW_IPS"] == "*"
    assert "TUNELOOP__EXPLORER__ADMIN_KEY" in in_compose


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_run_as_nobody_in_particular_and_serving_has_its_probes(overlay: str) -> None:
    templates = [template for each in rendered(overlay) for template in pods(each)]
    serving = [
        container
        for template in templates
        for container in template["spec"]["containers"]
        if any(port["containerPort"] == 8010 for port in container.get("ports", ()))
    ]
    for template in templates:
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in template["spec"]["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    [explorer] = serving
    assert {each["httpGet"]["path"] for each in (explorer["readinessProbe"], explorer["livenessProbe"])} == {
        "/health/ready",
        "/health/live",
    }


def test_the_shared_folder_may_be_written_by_many_nodes() -> None:
    [claim] = [each for each in rendered("base") if each["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_grafanas_provisioning_points_at_what_is_mounted() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "tuneloop.yml").read_text())["providers"]
    mounts = yaml.safe_load(COMPOSE[0].read_text())["services"]["grafana"]["volumes"]
    assert f"../grafana/dashboards:{provider['options']['path']}:ro" in mounts
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "tuneloop.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
