# Install /app in place, so that `tailrace` is a command and its version is known, and compile its bytecode into the image,
# which is read-only when it runs.
set -eu
/opt/tailrace/bin/pip install --quiet --no-cache-dir --no-compile --no-index --no-deps --no-build-isolation --editable /app
rm -rf /app/build
python -m compileall -q --invalidation-mode unchecked-hash /app
