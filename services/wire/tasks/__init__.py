"""What a task is called, what its data comes in, and what a trial of one found."""
