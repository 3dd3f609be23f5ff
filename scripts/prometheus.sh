#!/usr/bin/env bash
# Prints the folder of promtool and prometheus: of those that are installed, or of Debian's package, which is fetched into
# .work and not installed. Fails, and says why, where neither is to be had.
#
#   scripts/prometheus.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' scripts/prometheus.sh
}
case ${1:-} in
"") ;;
-h | --help) usage && exit ;;
*) usage >&2 && exit 2 ;;
esac

if command -v promtool >/dev/null && command -v prometheus >/dev/null; then
    dirname "$(command -v promtool)"
    exit
fi
folder=$PWD/.work/prometheus
if ! [ -x "$folder/usr/bin/promtool" ]; then
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || {
        echo "prometheus.sh: no promtool and prometheus in PATH, and no apt-get to fetch them" >&2
        exit 1
    }
    rm -rf "$folder"
    mkdir -p "$folder"
    fetch() { (cd "$folder" && apt-get download -qq prometheus >/dev/null 2>"$folder/log"); }
    # Lists that are empty, or too old, are root's to renew.
    fetch || { [ "$(id -u)" -eq 0 ] && apt-get update -qq >/dev/null 2>&1 && fetch; } || {
        echo "prometheus.sh: Debian's package could not be fetched: $(tail -n 1 "$folder/log")" >&2
        exit 1
    }
    dpkg -x "$folder"/prometheus_*.deb "$folder"
    rm -f "$folder"/prometheus_*.deb
fi
echo "$folder/usr/bin"
