"""What a fit reports beside its files: the log, loss curves as pictures, TensorBoard, MLflow, and a GPU's allocations."""
