"""A real Prometheus that scrapes a server, where there is one, and what is asked of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from quire.frontend.supervisor import free_port
from tests.live import ROOT

PROMETHEUS = shutil.which("prometheus") or ""
PROMTOOL = shutil.which("promtool") or ""
RULES = ROOT / "deploy/prometheus/rules.yml"
DASHBOARD = ROOT / "deploy/grafana/dashboards/serving.json"


class Scraping:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=100, trust_env=False)

    def ready(self) -> bool:
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression, now."""
        answer = self.http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def scraped(self, times: int, seconds: float = 200.0) -> None:
        """Wait until there have been so many more scrapes."""
        count = "sum(count_over_time(up[1h]))"
        begin = float(next(iter(self.ask(count)), {"value": [0, 0]})["value"][1])
        deadline = time.monotonic() + seconds
        while float(next(iter(self.ask(count)), {"value": [0, 0]})["value"][1]) < begin + times:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def rules(self) -> dict[str, dict[str, Any]]:
        groups = self.http.get("/api/v1/rules").json()["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}


@contextmanager
def prometheus(folder: Path, url: str) -> Iterator[Scraping]:
    """One that scrapes `url` three times a second and evaluates our rules every second."""
    config = {
        "global": {"scrape_interval": "300ms", "scrape_timeout": "300ms", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "quire", "static_configs": [{"targets": [url.removeprefix("http://")]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    arguments = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([PROMETHEUS, *arguments, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        scraping = Scraping(f"http://{address}")
        deadline = time.monotonic() + 200
        while not scraping.ready():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "prometheus.log").read_text()
            time.sleep(0.05)
        yield scraping
        scraping.http.close()
    finally:
        process.terminate()
        process.wait(200)


def queries() -> dict[str, list[str]]:
    """The dashboard's expressions by row, its variables filled in."""
    found: dict[str, list[str]] = {}
    row = "top"
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$model_name", "embedded").replace("$__rate_interval", "1m")
            found.setdefault(row, []).append(expression)
    return found
