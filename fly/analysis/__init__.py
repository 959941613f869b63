"""What runs say: scores, statistics, tables and the report. Loads no torch."""
