"""Weighted regression on the images: RWR, SFT, SRUM's cells."""
