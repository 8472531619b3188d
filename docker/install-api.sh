#!/bin/sh
# The installation steps of the API image. docker/check.sh runs the same ones in a virtual
# environment of its own.
#
# usage: install-api.sh PYTHON SOURCE
set -eu

python=$1
source=$2

"$python" -m pip install --quiet --no-cache-dir --disable-pip-version-check \
    --constraint "$source/constraints.txt" "$source[server]"
"$python" -m pip check --disable-pip-version-check
