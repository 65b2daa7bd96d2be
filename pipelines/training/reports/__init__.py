"""Reports of a fit: log, loss curves as pictures, TensorBoard, MLflow, and a GPU's allocations."""
