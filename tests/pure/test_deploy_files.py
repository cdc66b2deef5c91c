"""The compose file, the Kubernetes manifest, the Helm chart and the Dockerfile are valid and use existing options.

The tests do not need Helm. The function `render` implements the parts of Helm's template language that the chart uses.
"""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.main import add_commands
from kvtier.cli.parser import Parser

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "kvtier"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
CHANGED = {
    "replicas": 3,
    "shared": "redis://redis:6379/0?ttl=7d",
    "disk": {"size": "2Ti", "bytes": "1TiB", "storageClass": "fast", "bytesPerDay": "500GiB", "secret": "disk-key"},
}


def render(text: str, values: dict[str, Any]) -> str:
    """Render a template that uses `if`, `end`, `quote`, .Values and .Release.Name."""
    lines, shown = [], [True]
    for line in text.splitlines():
        if match := re.fullmatch(r"\{\{- if (\S+) \}\}", line):
            shown.append(shown[-1] and bool(value_of(match[1], values)))
        elif line == "{{- end }}":
            shown.pop()
        elif shown[-1]:
            lines.append(re.sub(r"\{\{ (\S+)( \| quote)? \}\}", lambda m: put(m[1], bool(m[2]), values), line))
    assert shown == [True]
    assert not any("{{" in line for line in lines)
    return "\n".join(lines)


def value_of(path: str, values: dict[str, Any]) -> Any:
    found: Any = {"Values": values, "Release": {"Name": "some-release"}}
    for name in path.lstrip(".").split("."):
        found = found[name]
    return found


def put(path: str, is_quoted: bool, values: dict[str, Any]) -> str:
    found = value_of(path, values)
    return f'"{found}"' if is_quoted else str(found)


def objects() -> dict[str, list[dict[str, Any]]]:
    template = (CHART / "templates" / "kvtier.yaml").read_text()
    texts = {
        "manifest": (ROOT / "deploy" / "kubernetes" / "kvtier.yaml").read_text(),
        "chart": render(template, VALUES),
        "chart with values": render(template, {**VALUES, **CHANGED}),
    }
    return {name: list(yaml.safe_load_all(text)) for name, text in texts.items()}


OBJECTS = objects()


def options_of_serve() -> set[str]:
    commands = Parser().add_subparsers(parser_class=Parser)
    add_commands(commands)
    return {flag for action in commands.choices["serve"]._actions for flag in action.option_strings}


@pytest.mark.parametrize("name", OBJECTS)
def test_kubernetes_objects_fit_the_schema(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings of the validator and its dependencies
        validator = pytest.importorskip("kubernetes_validate")
        for each in OBJECTS[name]:
            validator.validate(each, validator.latest_version(), strict=True)
    assert [each["kind"] for each in OBJECTS[name]] == ["Service", "StatefulSet"]


@pytest.mark.parametrize("name", OBJECTS)
def test_kubernetes_pod_is_hardened_and_probed(name):
    pod = OBJECTS[name][1]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    probes = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert probes == {"startup": "/health", "readiness": "/health", "liveness": "/livez"}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claims = OBJECTS[name][1]["spec"]["volumeClaimTemplates"]
    assert mounted == {claim["metadata"]["name"] for claim in claims} | {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("name", OBJECTS)
def test_arguments_in_manifests_are_options_of_serve(name):
    arguments = OBJECTS[name][1]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {argument.partition("=")[0] for argument in arguments} <= options_of_serve()
    assert all(argument.partition("=")[2] for argument in arguments)


def test_chart_values_change_the_objects():
    stateful = OBJECTS["chart with values"][1]["spec"]
    container = stateful["template"]["spec"]["containers"][0]
    assert stateful["replicas"] == 3
    assert stateful["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "fast"
    expected = {"--disk-bytes-per-day=500GiB", "--disk-secret=/run/kvtier/disk/secret", f"--shared={CHANGED['shared']}"}
    assert expected <= {*container["args"]}
    assert "/run/kvtier/disk" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_compose_service_is_hardened_and_has_valid_options():
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["user"].partition(":")[0] != "0"
    flags = {word for word in services["kvtier"]["command"] if word.startswith("--")}
    assert flags <= options_of_serve()


def test_dockerfile_final_stage_has_no_compiler_and_no_root():
    build, final = (ROOT / "Dockerfile").read_text().split("\nFROM ${PYTHON}")[1:]
    assert "apt-get" not in final
    assert "USER 10001:10001" in final
    folder = re.search(r"kvtier build-native (\S+)", build)[1]
    assert f"KVTIER_NATIVE_DIR={folder}" in final
    entry = shlex.split(re.search(r"ENTRYPOINT \[(.*)\]", final)[1].replace(",", " "))
    assert {word for word in entry if word.startswith("--")} <= options_of_serve()
