"""An assistant that searches a mailbox by tools, tuned until it calls the right one with the right argument."""
