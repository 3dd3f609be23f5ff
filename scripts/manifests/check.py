"""Each document of the manifests against its kind's schema, with unknown fields refused.

    check.py FOLDER     what manifests.sh has put there: packages/, and istio/ and kustomized.yaml if they could be had
"""

import copy
import functools
import json
import pathlib
import re
import sys

import jsonschema
import keda
from ruamel.yaml import YAML

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
WORK = pathlib.Path(sys.argv[1])
KUBERNETES = "packages/kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict"
# Of what is older than its schema: Istio serves one shape under all versions of a kind.
ISTIO_VERSIONS = {
    "networking.istio.io/v1": "networking.istio.io/v1beta1",
    "networking.istio.io/v1alpha3": "networking.istio.io/v1alpha3",
    "security.istio.io/v1": "security.istio.io/v1beta1",
}
KEDA = "packages/cloudcoil/models/keda/v1alpha1.py"
# Read by kustomize itself, which refuses a field that it does not know.
KUSTOMIZE = "kustomize.config.k8s.io/v1beta1"


def strict(schema):
    """The schema with what an API server would silently drop refused."""
    if isinstance(schema, dict):
        # Branches of a choice have no type and repeat some fields only; an object without fields may have any.
        if schema.get("type") == "object" and schema.get("properties"):
            schema.setdefault("additionalProperties", False)
        if schema.get("nullable") and isinstance(schema.get("type"), str):
            schema["type"] = [schema["type"], "null"]
        for value in schema.values():
            strict(value)
    elif isinstance(schema, list):
        for value in schema:
            strict(value)
    return schema


def istio_schema(version, kind):
    path = WORK / "istio" / ISTIO_VERSIONS[version] / f"{kind}.js"
    found = re.search(r"^const schema = (\{.*?^\});", path.read_text(), re.S | re.M)
    schema = json.loads(found.group(1))
    schema["properties"]["metadata"] = {"type": "object"}
    # Their kind is an older version's, where a version is only another name.
    schema["properties"]["apiVersion"] = {"const": version}
    return strict(schema)


@functools.cache
def validator(version, kind):
    """The validator of a kind, or None where its schema could not be had."""
    if ".istio.io/" in version:
        return jsonschema.Draft7Validator(istio_schema(version, kind)) if (WORK / "istio").is_dir() else None
    if version == "keda.sh/v1alpha1":
        return jsonschema.Draft7Validator(keda.schema((WORK / KEDA).read_text(), kind))
    group = version.split("/")
    name = f"{kind.lower()}-{'-'.join([group[0].split('.')[0], *group[1:]])}.json"
    path = WORK / KUBERNETES / name
    schema = json.loads(path.read_text())
    # They name each other by an address in the web, of which this is the one file.
    definitions = json.loads((WORK / KUBERNETES / "_definitions.json").read_text())
    resolver = jsonschema.RefResolver("", schema, store={"https://kubernetes.io/api/_definitions.json": definitions})
    return jsonschema.Draft7Validator(schema, resolver=resolver)


def faults(document):
    """What is wrong with a document; None where nothing can be said."""
    checker = validator(document["apiVersion"], document["kind"])
    if checker is None:
        return None
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in checker.iter_errors(document)]


def misspelt(document):
    """A copy with one field more, deep inside, that no schema has."""
    wrong = copy.deepcopy(document)
    place = wrong
    for key in ("spec", "template", "spec"):
        if isinstance(place.get(key), dict):
            place = place[key]
    place["replicaz"] = 3
    return wrong


def main():
    checked, unchecked = 0, 0
    files = [*ROOT.glob("envoy/kubernetes/*.yaml"), *ROOT.glob("envoy/istio/*.yaml"), *WORK.glob("kustomized.yaml")]
    for path in sorted(files):
        for document in YAML(typ="safe", pure=True).load_all(path.read_text()):
            if document.get("apiVersion") in (None, KUSTOMIZE):
                continue  # or an Envoy's own configuration
            where = f"{path.name}: {document['kind']} {document['metadata']['name']}"
            found = faults(document)
            if found is None:
                unchecked += 1
                continue
            if found:
                sys.exit(f"{where}\n  " + "\n  ".join(found))
            if document["kind"] != "ServiceAccount" and "spec" in document and not faults(misspelt(document)):
                sys.exit(f"{where}: its schema takes a field that nothing has")
            checked += 1
    if unchecked:
        print(f"SKIPPED manifests: {unchecked} documents of Istio's kinds")
    print(f"manifests: {checked} documents are as their schemas say")
    if checked < 23:
        sys.exit("fewer than there are")


main()
