"""`python -m tools.manifest_types FILE...`: manifests of custom resources as a TypeScript program that checks them.

Compiled, it has errors for fields that the resource's definition lacks; run, for values that it does not allow. The
types are those of the npm packages @kubernetes-models/*. `.ci/deploy` does both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

PACKAGES = {
    "monitoring.coreos.com": "prometheus-operator",
    "keda.sh": "keda",
    "gateway.networking.k8s.io": "gateway-api",
}


WITHOUT = {"inference.networking.k8s.io"}
"""Groups that have no such package: tests/test_deploy.py looks at their manifests."""


def main() -> None:
    read = [one for file in sys.argv[1:] for one in yaml.safe_load_all(Path(file).read_text("utf-8"))]
    manifests = [one for one in read if one["apiVersion"].partition("/")[0] not in WITHOUT]
    for number, manifest in enumerate(manifests):
        version, kind = manifest["apiVersion"], manifest["kind"]
        package = f"@kubernetes-models/{PACKAGES[version.partition('/')[0]]}"
        print(f'import {{ {kind}, type I{kind} }} from "{package}/{version}/{kind}";')
        print(f"const manifest{number}: I{kind} = {json.dumps(manifest)};")
        print(f"new {kind}(manifest{number}).validate();")
        print(f'console.log("{kind} {manifest["metadata"]["name"]}: valid");')


if __name__ == "__main__":
    main()
