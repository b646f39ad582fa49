"""The trainer's part: batches that are leased, returned, trained on."""
