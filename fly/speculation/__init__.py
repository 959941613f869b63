"""The method: drafting, verification, and the one decode loop."""
