"""CRD: centered reward distillation."""
