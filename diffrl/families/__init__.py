"""The shipped families of pipelines, one file each; `diffrl.policy.registry` finds one by its pipeline's class."""
