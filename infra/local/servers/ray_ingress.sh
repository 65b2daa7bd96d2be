#!/bin/sh
# What Ray Serve starts as HAProxy (RAY_SERVE_HAPROXY_BINARY_PATH); see ray_ingress.py. RAY_INGRESS_OPTIONS are its options.
root=$(cd "$(dirname "$0")/../../.." && pwd)
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${RAY_INGRESS_PYTHON:-python}" -m infra.local.servers.ray_ingress \
    ${RAY_INGRESS_OPTIONS:-} -- "$@"
