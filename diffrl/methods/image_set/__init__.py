"""Image sets: pictures with prompts and scores in the place of a rollout, or beside one."""
