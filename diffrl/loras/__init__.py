"""LoRAs that a user names: found, read in the forms that people have, merged into a model, trained on."""
