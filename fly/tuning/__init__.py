"""`fly tune`: which configuration decodes fastest on this machine (docs/configuration.md).

candidates  the list of configurations that are tried.
real_runs   a configuration through lm-eval, measured and scored.
fidelity    whether the scores held.
confirm     the fastest once more, on documents that the search has not seen.
tune        all of this, in order: successive halving over growing sets of documents; finished runs
            are kept on disk, for a tune that is started again.
output      the configuration with its evidence, the record, the table.
"""
