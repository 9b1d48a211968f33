"""What is deployed asks for options, routes, metrics and folders that there are. No Docker is needed to see that."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from quire.assembly.kv_offload import addresses
from quire.cli import main
from quire.config import OPTIONS, Settings, load
from quire.errors import InvalidConfig
from tests.live import environment, serving, tls_pair
from tests.prometheus import RULES
from tools.metrics_page import markdown

ROOT = Path(__file__).parents[1]
DEPLOYMENT, SERVICE = yaml.safe_load_all((ROOT / "deploy/kubernetes/quire.yaml").read_text())
[SCALED] = yaml.safe_load_all((ROOT / "deploy/kubernetes/autoscaling.yaml").read_text())
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
POD: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


def option(variable: str) -> str:
    name = variable.removeprefix("QUIRE_").lower()
    assert variable.startswith("QUIRE_") and name in OPTIONS, variable
    return name


def test_every_variable_is_an_option_with_a_value_it_takes() -> None:
    given = {option(each["name"]): each.get("value", "secret") for each in CONTAINER["env"]}
    made = Settings.build({name: (value, "deploy") for name, value in given.items()})
    assert made.server.api_key == made.access.admin_key == ("secret",)
    image = dict(re.findall(r"^ENV (\w+)=(\S+)", DOCKERFILE, re.MULTILINE))
    for variable, value in image.items():
        assert Settings.build({option(variable): (value, "image")}).get(option(variable)) == value
    assert image["QUIRE_HOST"] == "0.0.0.0"


def test_whoever_runs_may_finish_before_the_container_is_killed() -> None:
    given = {option(each["name"]): each.get("value") for each in CONTAINER["env"]}
    assert POD["terminationGracePeriodSeconds"] > float(given["shutdown_timeout"])
    assert int(COMPOSE["services"]["quire"]["stop_grace_period"].removesuffix("s")) > Settings().server.shutdown_timeout


def test_probes_ask_for_routes_that_want_no_key() -> None:
    asked = [CONTAINER[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")]
    assert asked == ["/health/ready", "/health/ready", "/health/live"]
    routes = (ROOT / "docs/guides/serving.md").read_text()
    assert all(f"`GET {path}`" in routes for path in asked)


def of_a_service(name: str, address: str, port: int, called: str) -> dict[str, str]:
    """What the kubelet injects for a Service with one named port (envvars.FromServices)."""
    begin, url = name.upper().replace("-", "_"), f"tcp://{address}:{port}"
    return {
        f"{begin}_SERVICE_HOST": address,
        f"{begin}_SERVICE_PORT": str(port),
        f"{begin}_SERVICE_PORT_{called.upper().replace('-', '_')}": str(port),
        f"{begin}_PORT": url,
        f"{begin}_PORT_{port}_TCP": url,
        f"{begin}_PORT_{port}_TCP_PROTO": "tcp",
        f"{begin}_PORT_{port}_TCP_PORT": str(port),
        f"{begin}_PORT_{port}_TCP_ADDR": address,
    }


@pytest.mark.parametrize("name", [SERVICE["metadata"]["name"], "quire-embeddings", "quire-port"])
def test_the_environment_that_kubernetes_injects_is_no_setting(name: str) -> None:
    injected = of_a_service("kubernetes", "10.96.0.1", 443, "https") | of_a_service(name, "10.96.12.7", 8000, "http")
    settings = load(environ=injected)
    assert settings.server.port == 8000 and settings.source("port") == "default"
    own = {each["name"]: each.get("value", "secret") for each in CONTAINER["env"]}
    assert load(environ=injected | own) == load(environ=own)
    assert load(environ=injected | {"QUIRE_PORT": "9000"}).server.port == 9000
    assert POD["enableServiceLinks"] is False


@pytest.mark.parametrize("variable", ["QUIRE_PORT_HTTP", "QUIRE_SERVICE", "QUIRE_SERVICES_PORT", "QUIRE_PORT_80_HTTP"])
def test_what_only_resembles_an_injected_variable_is_refused(variable: str) -> None:
    with pytest.raises(InvalidConfig, match=variable):
        load(environ={variable: "1"})


def checked(address_file: Path) -> int:
    """The exit code of the image's health check."""
    found = re.search(r"^HEALTHCHECK .*\\\n  CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found
    command = [sys.executable, *json.loads(found[1])[1:]]
    proxies = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    variables = environment() | proxies | {"QUIRE_ADDRESS_FILE": str(address_file)}
    return subprocess.run(command, env=variables, check=False, capture_output=True, timeout=300).returncode


def test_the_health_check_knows_the_port_and_tls(tmp_path: Path) -> None:
    key, certificate = tls_pair(tmp_path)
    file = tmp_path / "address"
    assert checked(file) != 0
    with serving(tmp_path, "--address-file", str(file), "--ssl-keyfile", key, "--ssl-certfile", certificate) as live:
        assert file.read_text() == live.url and live.url.startswith("https://")
        assert checked(file) == 0
    assert not file.exists()


def test_the_service_and_the_autoscaler_find_the_deployment() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels
    assert SCALED["spec"]["scaleTargetRef"]["name"] == DEPLOYMENT["metadata"]["name"]
    [port] = CONTAINER["ports"]
    assert port["containerPort"] == Settings().server.port
    assert SERVICE["spec"]["ports"][0]["targetPort"] == port["name"]


def test_servers_are_added_by_figures_there_are_before_the_ones_there_are_full() -> None:
    asked = SCALED["spec"]["triggers"][0]["metadata"]
    names = re.findall(r"\bvllm:\w+", asked["query"])
    assert names
    known = markdown()
    assert all(f"`{name}`" in known for name in names)
    rules = yaml.safe_load(RULES.read_text())
    recorded = {rule.get("record"): rule["expr"] for group in rules["groups"] for rule in group["rules"]}
    # a real Prometheus evaluates the rule in test_metrics, so the question is one it understands, too
    assert re.sub(r" by \(.*?\) ", "", recorded["model:outstanding_requests"]) == asked["query"]
    seats = next(each["value"] for each in CONTAINER["env"] if each["name"] == "QUIRE_MAX_NUM_SEQS")
    assert 0 < int(asked["threshold"]) < int(seats)


def test_downloads_and_compiled_kernels_have_volumes_that_the_image_s_user_may_write() -> None:
    mounted = dict(each.split(":") for each in COMPOSE["services"]["quire"]["volumes"])
    inside = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    assert mounted == inside
    assert inside == {"models": "/home/quire/.cache/huggingface", "kernels": "/home/quire/.triton"}
    assert {each["name"] for each in POD["volumes"]} == inside.keys() <= COMPOSE["volumes"].keys()
    made = re.search(r"^RUN install -d -o quire -g quire (.*)$", DOCKERFILE, re.MULTILINE)
    assert made and {*inside.values()} <= {*made[1].split()}
    assert DOCKERFILE.index("install -d") < DOCKERFILE.index("USER quire")


def test_the_image_s_command_is_one_there_is() -> None:
    words = shlex.split(" ".join(re.findall(r"^(?:ENTRYPOINT|CMD) \[(.*)\]$", DOCKERFILE, re.MULTILINE)))
    assert words == ["quire", "serve"]
    with click.Context(main) as context:
        assert main.get_command(context, words[1]) is not None


def test_the_image_has_every_file_that_the_build_needs() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY_NOTICES.md", "src"}
    assert all((ROOT / name).exists() and f"!{name}" in ignored for name in copied)


def test_the_image_for_a_gpu_has_the_compiler_that_triton_needs() -> None:
    lines = DOCKERFILE.replace("\\\n", "").splitlines()
    [compiler] = [line for line in lines if "apt-get install" in line]
    assert compiler.startswith('RUN if [ -z "$TORCH_INDEX" ]; then') and " gcc libc6-dev " in compiler
    assert lines.index(compiler) > next(i for i, line in enumerate(lines) if line.startswith("ARG TORCH_INDEX="))


def test_prometheus_finds_every_pod_and_not_one_through_the_service() -> None:
    [monitor] = yaml.safe_load_all((ROOT / "deploy/kubernetes/monitoring.yaml").read_text())
    assert monitor["kind"] == "PodMonitor"
    assert monitor["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]
    [port] = CONTAINER["ports"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
    keys = [each["valueFrom"]["secretKeyRef"] for each in CONTAINER["env"] if each["name"] == "QUIRE_ADMIN_KEY"]
    assert [endpoint["authorization"]["credentials"]] == keys
    [job] = yaml.safe_load((ROOT / "deploy/prometheus/kubernetes.yml").read_text())["scrape_configs"]
    [found] = job["kubernetes_sd_configs"]
    assert found["role"] == "pod" and "static_configs" not in job
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert found["selectors"] == [{"role": "pod", "label": f"app={labels['app']}"}]
    assert {
        "source_labels": ["__meta_kubernetes_pod_container_port_name"],
        "regex": port["name"],
        "action": "keep",
    } in (job["relabel_configs"])


MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
VERSIONS = ("1.31", kubernetes_validate.latest_version())
"""Of Kubernetes: the oldest with a schema that is still in use, and the latest."""


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_the_schemas_of_kubernetes(version: str) -> None:
    """Strictly: an unknown field is an error. Kinds of operators have their own tests."""
    kinds = []
    for path in MANIFESTS:
        for manifest in yaml.safe_load_all(path.read_text()):
            if manifest["apiVersion"] in ("v1", "apps/v1", "networking.k8s.io/v1"):
                kubernetes_validate.validate(manifest, version, strict=True)
                kinds.append(manifest["kind"])
    quire, split = ["Deployment", "NetworkPolicy", "Service"], ["NetworkPolicy", "Service", "Service", "StatefulSet"]
    assert sorted(kinds) == sorted([*quire, "Deployment", *split])


def test_a_manifest_with_a_wrong_field_is_refused() -> None:
    wrong = json.loads(json.dumps(SERVICE))
    wrong["spec"]["selektor"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="selektor"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_pods_meet_the_restricted_standard() -> None:
    """Kubernetes' Pod Security Standards, "restricted"."""
    assert POD["securityContext"]["runAsNonRoot"] and POD["securityContext"]["runAsUser"] != 0
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert CONTAINER["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert POD["automountServiceAccountToken"] is False
    assert all({*volume} - {"name"} <= {"emptyDir", "persistentVolumeClaim"} for volume in POD["volumes"])


def test_the_network_policy_is_of_the_pods_and_lets_their_port_in() -> None:
    [policy] = yaml.safe_load_all((ROOT / "deploy/kubernetes/network.yaml").read_text())
    assert policy["spec"]["podSelector"] == DEPLOYMENT["spec"]["selector"]
    [ingress], [names, models] = policy["spec"]["ingress"], policy["spec"]["egress"]
    [port] = CONTAINER["ports"]
    assert [each["port"] for each in ingress["ports"]] == [port["name"]]
    assert {each["port"] for each in names["ports"]} == {53}
    assert [each["port"] for each in models["ports"]] == [443]


SPLIT = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/disaggregation.yaml").read_text()))
SPLIT_COMPOSE = yaml.safe_load((ROOT / "deploy/compose/disaggregation.yaml").read_text())


def of_split(kind: str) -> dict[str, Any]:
    [found] = [each for each in SPLIT if each["kind"] == kind]
    return dict(found)


def variables(kind: str) -> dict[str, str]:
    [container] = of_split(kind)["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each.get("value", "a secret") for each in container["env"]}


SIDES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "kubernetes": (variables("StatefulSet"), variables("Deployment")),
    "compose": (
        SPLIT_COMPOSE["services"]["prefill"]["environment"],
        SPLIT_COMPOSE["services"]["decode"]["environment"],
    ),
}


@pytest.mark.parametrize("where", SIDES)
def test_both_sides_of_a_split_have_options_by_which_they_find_each_other(
    where: str,
) -> None:
    prefill, decode = (
        Settings.build({option(name): (value, where) for name, value in each.items()}) for each in SIDES[where]
    )
    assert (prefill.disaggregation.disaggregation_mode, decode.disaggregation.disaggregation_mode) == (
        "prefill",
        "decode",
    )
    [listening] = addresses(prefill)
    asked = addresses(decode)
    assert listening.host == "0.0.0.0" and {each.port for each in asked} == {listening.port}
    hosts = ["prefill"] if where == "compose" else [f"quire-prefill-{i}.quire-prefill" for i in range(2)]
    assert [each.host for each in asked] == hosts
    mine = ("disaggregation_mode", "disaggregation_address")
    for name in OPTIONS:
        assert name in mine or prefill.get(name) == decode.get(name), f"{name}: blocks of one side fit the other"


def test_the_pods_of_a_split_are_those_of_one_engine_with_a_secret_more() -> None:
    prefill, decode = of_split("StatefulSet"), of_split("Deployment")
    [headless, service] = [each for each in SPLIT if each["kind"] == "Service"]
    assert prefill["spec"]["serviceName"] == headless["metadata"]["name"] and headless["spec"]["clusterIP"] == "None"
    assert prefill["spec"]["replicas"] == len(addresses_of(decode))
    assert (
        service["metadata"]["name"] == SERVICE["metadata"]["name"]
        and service["spec"]["ports"] == SERVICE["spec"]["ports"]
    )
    for each, found in ((prefill, headless), (decode, service)):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert found["spec"]["selector"] == each["spec"]["selector"]["matchLabels"] == labels
        pod = each["spec"]["template"]["spec"]
        [container], *volumes = pod["containers"], *pod["volumes"]
        secret = next(volume for volume in volumes if "secret" in volume)
        assert [volume for volume in volumes if volume is not secret] == POD["volumes"]
        assert {name: value for name, value in pod.items() if name not in ("containers", "volumes")} == {
            name: value for name, value in POD.items() if name not in ("containers", "volumes")
        }
        for name in ("image", "securityContext", "startupProbe", "readinessProbe", "livenessProbe", "resources"):
            assert container[name] == CONTAINER[name], name
        [mounted] = [mount for mount in container["volumeMounts"] if mount["name"] == secret["name"]]
        file = dict(variables(each["kind"]))["QUIRE_DISAGGREGATION_SECRET_FILE"]
        assert file == f"{mounted['mountPath']}/{secret['secret']['items'][0]['path']}"
    policy = of_split("NetworkPolicy")["spec"]
    assert policy["podSelector"] == prefill["spec"]["selector"]
    [blocks, http] = policy["ingress"]
    assert blocks["from"] == [{"podSelector": decode["spec"]["selector"]}]
    ports = {port["name"] for port in prefill["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert {each["port"] for rule in (blocks, http) for each in rule["ports"]} == ports == {"blocks", "http"}


def addresses_of(manifest: dict[str, Any]) -> list[str]:
    return variables(manifest["kind"])["QUIRE_DISAGGREGATION_ADDRESS"].split(",")


def test_the_services_of_a_split_share_an_image_a_secret_and_volumes() -> None:
    services = SPLIT_COMPOSE["services"]
    for each in services.values():
        assert (ROOT / "deploy/compose" / each["build"]).resolve() == ROOT
        assert each["volumes"] == COMPOSE["services"]["quire"]["volumes"]
        assert each["stop_grace_period"] == COMPOSE["services"]["quire"]["stop_grace_period"]
        [secret] = each["secrets"]
        assert each["environment"]["QUIRE_DISAGGREGATION_SECRET_FILE"] == f"/run/secrets/{secret}"
    file = SPLIT_COMPOSE["secrets"][secret]["file"]
    assert f"deploy/compose/{file}" in (ROOT / ".gitignore").read_text()
    assert "ports" not in services["prefill"] and services["decode"]["ports"] == COMPOSE["services"]["quire"]["ports"]


UNIT = (ROOT / "deploy/systemd/quire.service").read_text()


def unit(name: str) -> list[str]:
    """The values of a setting of the unit, in the order of its lines."""
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


def test_the_unit_starts_a_command_there_is_with_options_there_are() -> None:
    [command] = unit("ExecStart")
    assert command.split()[0].endswith("/quire")
    with click.Context(main) as context:
        assert main.get_command(context, command.split()[1]) is not None
    given = dict(each.split("=", 1) for each in unit("Environment"))
    settings = Settings.build({option(name): (value, "unit") for name, value in given.items() if "QUIRE_" in name})
    assert settings.server.host == "127.0.0.1"
    [stop] = unit("TimeoutStopSec")
    assert int(stop) > settings.server.shutdown_timeout


def test_the_unit_may_write_where_models_kernels_and_files_are_kept() -> None:
    given = dict(each.split("=", 1) for each in unit("Environment"))
    [cache], [state] = unit("CacheDirectory"), unit("StateDirectory")
    assert unit("ProtectSystem") == ["strict"] and unit("DynamicUser") == ["yes"]
    assert given["HF_HOME"].startswith(f"/var/cache/{cache}/")
    assert given["TRITON_CACHE_DIR"].startswith(f"/var/cache/{cache}/")
    assert [given["HOME"]] == unit("WorkingDirectory") == [f"/var/lib/{state}"]
    assert not unit("MemoryDenyWriteExecute") and not unit("PrivateDevices")


def test_every_setting_of_the_unit_is_spelled_as_systemd_has_it() -> None:
    """A setting in another section, or with another name, is ignored by systemd with a line in its log."""
    known = {
        "Unit": {"Description", "Wants", "After"},
        "Service": {
            *("Type", "Environment", "EnvironmentFile", "ExecStart", "TimeoutStopSec", "KillMode", "Restart"),
            *("RestartSec", "LimitNOFILE", "DynamicUser", "CacheDirectory", "StateDirectory", "StateDirectoryMode"),
            *("WorkingDirectory", "NoNewPrivileges", "ProtectSystem", "ProtectHome", "PrivateTmp"),
            *("ProtectKernelTunables", "ProtectKernelModules", "ProtectControlGroups", "RestrictAddressFamilies"),
            *("RestrictSUIDSGID", "CapabilityBoundingSet"),
        },
        "Install": {"WantedBy"},
    }
    section = ""
    for line in UNIT.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            assert line.partition("=")[0] in known[section], line
    assert section == "Install"
