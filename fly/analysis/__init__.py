"""What runs say: scores, statistics, tables, plots and the report. Loads no torch."""
