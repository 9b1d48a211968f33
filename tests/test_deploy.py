"""What is deployed asks for options, routes, metrics and folders that there are. No Docker is needed to see that."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import yaml

from quire.cli import main
from quire.config import OPTIONS, Settings
from quire.observe.document import markdown
from tests.prometheus import RULES

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
    for variable, value in re.findall(r"^ENV (\w+)=(\S+)", DOCKERFILE, re.MULTILINE):
        assert Settings.build({option(variable): (value, "image")}).get(option(variable)) == value == "0.0.0.0"


def test_whoever_runs_may_finish_before_the_container_is_killed() -> None:
    given = {option(each["name"]): each.get("value") for each in CONTAINER["env"]}
    assert POD["terminationGracePeriodSeconds"] > float(given["shutdown_timeout"])
    assert int(COMPOSE["services"]["quire"]["stop_grace_period"].removesuffix("s")) > Settings().server.shutdown_timeout


def test_probes_ask_for_routes_that_want_no_key() -> None:
    asked = [CONTAINER[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")]
    assert asked == ["/health/ready", "/health/ready", "/health/live"]
    assert "8000/health/live'" in DOCKERFILE
    routes = (ROOT / "docs/server.md").read_text()
    assert all(f"`GET {path}`" in routes for path in asked)


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


def test_downloads_have_a_place_that_the_image_s_user_may_write() -> None:
    [mounted] = [each.partition(":")[2] for each in COMPOSE["services"]["quire"]["volumes"]]
    [inside] = [each["mountPath"] for each in CONTAINER["volumeMounts"]]
    assert mounted == inside
    made = re.search(r"^RUN install -d -o quire -g quire (.*)$", DOCKERFILE, re.MULTILINE)
    assert made and inside in made[1].split()
    assert DOCKERFILE.index("install -d") < DOCKERFILE.index("USER quire")


def test_the_image_s_command_is_one_there_is() -> None:
    words = shlex.split(" ".join(re.findall(r"^(?:ENTRYPOINT|CMD) \[(.*)\]$", DOCKERFILE, re.MULTILINE)))
    assert words == ["quire", "serve"]
    with click.Context(main) as context:
        assert main.get_command(context, words[1]) is not None


def test_the_image_has_every_file_that_the_build_needs() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "src"}
    assert all((ROOT / name).exists() and f"!{name}" in ignored for name in copied)
