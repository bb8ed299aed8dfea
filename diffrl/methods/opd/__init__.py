"""On-policy distillation of several teachers."""
