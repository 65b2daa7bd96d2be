# Installs the sources in /app where they lie, so that `tailrace` is a command and the version is known, and makes their bytecode
# part of the image, which is read-only when it runs.
set -eu
/opt/tailrace/bin/pip install --quiet --no-cache-dir --no-compile --no-index --no-deps --no-build-isolation --editable /app
rm -rf /app/build
python -m compileall -q --invalidation-mode unchecked-hash /app
