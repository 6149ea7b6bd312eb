"""`./dev bench loop`: the whole loop beside TRL's GRPOTrainer."""
