"""Measurements of trainings: loaders side by side, profiles, single tricks, consistency."""
