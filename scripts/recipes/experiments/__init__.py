"""What is measured of trainings: loaders side by side, where the time goes, single tricks, consistency."""
