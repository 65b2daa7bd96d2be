# Install /app in place, so that `tailrace` is a command and its version is known, and compile its bytecode into the image,
# which is read-only when it runs. The modes of the checkout, whose umask may have closed or opened every file, do not reach it.
set -eu
chmod -R u+rwX,go+rX,go-w /app
chmod 755 /app/infra/local/servers/ray_ingress.sh
/opt/tailrace/bin/pip install --quiet --no-cache-dir --no-compile --no-index --no-deps --no-build-isolation --editable /app
rm -rf /app/build
python -m compileall -q --invalidation-mode unchecked-hash /app
