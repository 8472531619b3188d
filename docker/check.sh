#!/bin/sh
# What the API image would do, without docker: install into a clean virtual environment by the
# image's own steps and from its own build context, start the service, ask after its health, and
# see that there is no torch. Exit status 0 if all of that holds.
#
# usage: docker/check.sh [PYTHON [INSTALL]]
# INSTALL, a program, is called in place of docker/install-api.sh with a Python that has no pip; the
# test suite's links what is installed already, so that nothing is fetched.
set -eu

python=${1:-python3}
install=${2:-}
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
server=

finish() {
    status=$?
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
    rm -rf "$work"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
    echo "docker/check.sh: $1" >&2
    exit 1
}

echo "copying what .dockerignore lets into the build"
mkdir "$work/src"
sed -n 's/^!//p' "$root/.dockerignore" | while read -r path; do
    cp -R -P "$root/$path" "$work/src/$path"
done

unset PYTHONPATH VIRTUAL_ENV
if [ -n "$install" ]; then
    echo "installing by $install"
    "$python" -m venv --without-pip "$work/venv"
    "$python" "$install" "$work/venv/bin/python" "$work/src"
else
    echo "installing by docker/install-api.sh"
    "$python" -m venv "$work/venv"
    sh "$work/src/docker/install-api.sh" "$work/venv/bin/python" "$work/src"
fi
rm -rf "$work/src"
cd "$work"

if venv/bin/python -c 'import torch' 2>/dev/null; then
    fail "torch is installed; the service's image has none"
fi

echo "starting the service"
STAGEWRIGHT_TOKEN=a-token-for-the-check venv/bin/python -P -m stagewright.api \
    --port 0 --database "$work/check.db" >"$work/announced" 2>"$work/log" &
server=$!
tries=0
until [ -s "$work/announced" ]; do
    kill -0 "$server" 2>/dev/null || { cat "$work/log" >&2; fail "the service ended at once"; }
    tries=$((tries + 1))
    [ "$tries" -le 300 ] || fail "the service did not start within 30 seconds"
    sleep 0.1
done
url=$(venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["url"])' <"$work/announced")
venv/bin/python "$root/docker/healthcheck.py" "$url"

echo "stopping it"
kill "$server"
wait "$server" || { cat "$work/log" >&2; fail "the service did not end cleanly"; }
server=
echo "ok: installs, starts, is healthy, has no torch, stops"
