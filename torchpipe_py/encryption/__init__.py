"""Models that are encrypted where they lie, and decrypted in memory only."""
