"""Pictures with prompts and scores, from files: trained on in the place of a rollout's images, or beside them."""
