"""Learning to place: policies, their training, and learners beside a served model."""
