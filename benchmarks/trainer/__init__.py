"""`./dev bench trainer`: the trainer's step beside a padded loop and TRL's GRPO step."""
