"""What hosts and tools read of the repository agrees with the package."""

import re
import tomllib
from typing import Any

import pytest
import yaml

import dynamo_backends
from tests.bench.programs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version():
    citation = read("CITATION.cff")
    assert citation["version"] == dynamo_backends.__version__
    assert citation["title"] == PROJECT["name"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert {"cff-version", "message"} <= set(citation)


def test_hosted_checks_run_what_the_makefile_has():
    jobs = read(".github/workflows/ci.yml")["jobs"]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    asked = set(re.findall(r"make PYTHON=python ([a-z]+)", commands))
    asked |= set(jobs["check"]["strategy"]["matrix"]["target"])
    assert asked == {"venv", "lint", "test", "dist"}
    assert asked <= targets
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert jobs["check"]["strategy"]["matrix"]["python"][0] == oldest


@pytest.mark.parametrize("form", [f for f in FORMS if f.stem != "config"], ids=lambda f: f.stem)
def test_forms_for_issues_are_complete(form: Any):
    contents = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert set(contents) == {"name", "description", "labels", "body"}
    names = [field["id"] for field in contents["body"]]
    assert len(set(names)) == len(names) >= 2
    assert all(field["attributes"]["label"] for field in contents["body"])


@pytest.mark.parametrize(
    "name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "README.md", "CONTRIBUTING.md"]
)
def test_links_between_files_lead_somewhere(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [x.split("#")[0] for x in re.findall(r"\]\(([^)]+)\)", text) if "://" not in x]
    assert [x for x in links if x and not (ROOT / x).exists()] == []
