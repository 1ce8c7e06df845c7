"""Models that are encrypted on disk and decrypted only in memory."""
