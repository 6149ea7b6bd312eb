"""`./dev bench kept`: a long run's kept rollouts, written and found."""
