#!/bin/sh
# The installation steps of the API image. docker/check.sh runs the same ones in a virtual
# environment of its own.
#
# usage: install-api.sh PYTHON SOURCE [EXTRAS]
set -eu

python=$1
source=$2
extras=${3:-server,oidc,postgres,cluster}

"$python" -m pip install --quiet --no-cache-dir --disable-pip-version-check \
    --constraint "$source/constraints.txt" "$source[$extras]"
"$python" -m pip check --disable-pip-version-check
