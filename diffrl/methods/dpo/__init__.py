"""Flow-DPO online, with SePPO's references."""
