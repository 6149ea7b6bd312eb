"""Logging backends: a run's figures, samples and settings in TensorBoard, W&B, MLflow and trackio."""
