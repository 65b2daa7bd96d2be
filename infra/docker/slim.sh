# Remove from a virtual environment what no role of the image needs, then compile bytecode that depends on the sources alone.
# `sh slim.sh /opt/tailrace`
set -eu
cd "$1"/lib/python3.11/site-packages
rm -rf torch/test torch/include torch/share ray/jars ray/rllib ray/cpp \
       feast/ui pandas/tests onnx/backend/test pyarrow/include pyarrow/src
find torch/bin -type f -not -name torch_shm_manager -delete
find . -name '*.a' -delete
find . -name '*.pyi' -not -path './feast/*' -delete
find . -type d -name tests -path '*/numpy/*' -prune -exec rm -rf {} +
find . -type d -name tests \( -path './pyarrow/*' -o -path './ibis/*' -o -path './sympy/*' -o -path './dask/*' -o -path './networkx/*' \) \
       -prune -exec rm -rf {} +
python -m compileall -q -j 0 --invalidation-mode unchecked-hash "$1/lib" || true  # templates for other versions do not compile
