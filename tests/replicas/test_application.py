"""What Ray Serve is asked for: deployments, files for `serve deploy`, and settings that do not go together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from quire.config import Settings
from quire.errors import InvalidConfig
from quire.replicas.application import ENGINES, OF_RAY, SERVER, app, engine_options, engines, resources
from quire.replicas.environment import LOCAL, prepare

ROOT = Path(__file__).parents[2]
FILE = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
[KUBERAY] = yaml.safe_load_all((ROOT / "deploy/kubernetes/kuberay.yaml").read_text())
POOL, ROUTE = yaml.safe_load_all((ROOT / "deploy/kubernetes/gateway.yaml").read_text())
GUIDE = (ROOT / "docs/guides/replicas.md").read_text()


def options_of(application: Any) -> Any:
    return application._bound_deployment


def test_a_deployment_of_engines_has_the_settings() -> None:
    made = options_of(
        engines(Settings.of(replicas=2, replica_policy="round_robin", replica_drain_timeout=50, threads=3))
    )
    assert (made.name, made.num_replicas) == (ENGINES, 2)
    config = made._deployment_config
    assert config.autoscaling_config is None
    assert config.graceful_shutdown_timeout_s > 50
    router = config.request_router_config
    assert router.request_router_kwargs == {"policy": "round_robin", "max_imbalance": 4}
    assert made.ray_actor_options["num_cpus"] == 3 and made.ray_actor_options["num_gpus"] == 0
    [sent, _] = made.init_args
    assert Settings.of(**sent).replicas.several is False


def test_a_deployment_that_grows_has_the_autoscaler() -> None:
    settings = Settings.of(replicas=1, max_replicas=3, replica_queued_tokens=77, replica_up_delay=1.5)
    config = options_of(engines(settings))._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (1, 3)
    assert config.upscale_delay_s == config.downscale_delay_s == 0
    assert config.policy.policy_kwargs == {"target": 77, "low": 1, "high": 3, "up_delay": 1.5, "down_delay": 300.0}


def test_an_engine_gets_no_secrets() -> None:
    sent = engine_options(Settings.of(replicas=2, api_key=["hunter2"], admin_key=["hunter2"]))
    assert "hunter2" not in str(sent)


def test_a_replica_takes_the_gpus_of_its_ranks() -> None:
    assert resources(Settings.of(device="cuda", tensor_parallel_size=2)) == {"num_gpus": 2, "num_cpus": 1}
    assert resources(Settings.of(device="cpu", tensor_parallel_size=2, threads=4)) == {"num_gpus": 0, "num_cpus": 8}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 3, "max_replicas": 2}, "max_replicas .2. is below replicas"),
        ({"replicas": 2, "backend": "openai", "upstream": ["http://a:1"]}, "replicas are of our own engine"),
        ({"replicas": 2, "executor": "grpc", "executor_address": "a:1"}, "executor grpc is one for all"),
        (
            {"replicas": 2, "disaggregation_mode": "prefill", "disaggregation_address": ["127.0.0.1:1"]},
            "disaggregation_mode is for one engine",
        ),
        ({"replicas": 2, "pipeline_parallel_size": 2}, "replicas of such engines are not supported"),
        ({"max_replicas": 2, "recording_dir": "x"}, "recording_dir is for the recording of one engine"),
    ],
)
def test_what_does_not_go_with_replicas_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        Settings.of(**options)


@pytest.mark.parametrize("name", sorted(OF_RAY))
def test_what_ray_serve_decides_is_refused_in_its_file(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^{name}: "):
        app({name: "x"})


def test_the_environment_of_an_image_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HOST", "0.0.0.0")
    monkeypatch.setenv("QUIRE_ADDRESS_FILE", "/tmp/quire.address")
    made = options_of(app({"replicas": 2}))
    assert made.name == SERVER and made.num_replicas == 1
    assert made.ray_actor_options["num_cpus"] == 0  # it runs where engines take all cores


def applications() -> list[dict[str, Any]]:
    """Those of every file that is shown."""
    [block] = re.findall(r"```yml\n(.*?)```", GUIDE, re.DOTALL)
    files = (FILE, yaml.safe_load(KUBERAY["spec"]["serveConfigV2"]), yaml.safe_load(block))
    return [one for file in files for one in ServeDeploySchema.model_validate(file).model_dump()["applications"]]


def test_files_for_serve_deploy_are_as_ray_serve_reads_them() -> None:
    assert len(applications()) == 3
    for one in applications():
        assert one["import_path"] == f"{app.__module__}:{app.__name__}"
        settings = Settings.of(**one["args"])
        assert settings.replicas.most == 4
        assert options_of(app(one["args"])).name == SERVER


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_pods_of_the_ray_service_are_kubernetes_own_and_restricted(version: str) -> None:
    cluster = KUBERAY["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
        kubernetes_validate.validate(manifest, version, strict=True)
        [container] = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["enableServiceLinks"] is False
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        names = {each["name"] for each in container["env"]}
        assert {"QUIRE_API_KEY", "QUIRE_ADMIN_KEY", "RAY_USAGE_STATS_ENABLED"} == names


Fields = Mapping[str, type]
POD: Fields = {"template": dict, "rayStartParams": dict}
RAY_FIELDS: Mapping[str, Fields] = {
    "spec": {"serveConfigV2": str, "rayClusterConfig": dict},
    "rayClusterConfig": {
        "rayVersion": str,
        "enableInTreeAutoscaling": bool,
        "headGroupSpec": dict,
        "workerGroupSpecs": list,
    },
    "headGroupSpec": POD,
    "workerGroupSpecs": {**POD, "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int},
}
"""Of the operator's API ray.io/v1, those that the manifest has, and their types."""
PICKER: Fields = {"name": str, "port": dict, "failureMode": str}
"""Of endpointPickerRef in inference.networking.k8s.io/v1."""


def has_fields(found: dict[str, Any], fields: Fields) -> bool:
    return {name: type(value) for name, value in found.items()} == fields


def test_the_ray_service_has_fields_of_its_operator() -> None:
    assert (KUBERAY["apiVersion"], KUBERAY["kind"]) == ("ray.io/v1", "RayService")
    cluster = KUBERAY["spec"]["rayClusterConfig"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    parts = {
        "spec": [KUBERAY["spec"]],
        "rayClusterConfig": [cluster],
        "headGroupSpec": [head],
        "workerGroupSpecs": workers,
    }
    for name, found in parts.items():
        assert found and all(has_fields(one, RAY_FIELDS[name]) for one in found)
    for group in (head, *workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for group in workers:
        assert 0 < group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_gateway_chooses_among_the_pods_of_the_deployment() -> None:
    deployment, service = yaml.safe_load_all((ROOT / "deploy/kubernetes/quire.yaml").read_text())
    assert POOL["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert [port["number"] for port in POOL["spec"]["targetPorts"]] == [container["ports"][0]["containerPort"]]
    assert (POOL["apiVersion"], POOL["kind"]) == ("inference.networking.k8s.io/v1", "InferencePool")
    assert has_fields(POOL["spec"], {"selector": dict, "targetPorts": list, "endpointPickerRef": dict})
    assert has_fields(POOL["spec"]["endpointPickerRef"], PICKER) and len(POOL["spec"]["targetPorts"]) == 1
    assert POOL["spec"]["endpointPickerRef"]["failureMode"] in ("FailOpen", "FailClose")
    [rule] = ROUTE["spec"]["rules"]
    [backend] = rule["backendRefs"]
    group, _, _ = POOL["apiVersion"].partition("/")
    assert backend == {"group": group, "kind": POOL["kind"], "name": POOL["metadata"]["name"]}


def test_a_local_ray_is_of_this_user_and_sends_nothing() -> None:
    environ = {"RAY_AUTH_MODE": "disabled"}
    prepare(environ)
    assert environ == {**LOCAL, "RAY_AUTH_MODE": "disabled"}
    assert LOCAL["RAY_USAGE_STATS_ENABLED"] == "0"
