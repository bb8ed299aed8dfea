"""AC-Flow: regression against a critic of the noised image."""
