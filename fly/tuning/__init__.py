"""`fly tune`: which configuration of a pair decodes fastest on this machine (docs/tune.md).

baseline      the target alone over the documents: texts, scores, speed.
recorder      both models along those texts: what the draft proposes and the target says of it.
simulate      rounds of any configuration walked over a recording; no model.
pass_seconds  how long passes take on this machine.
search        a speed predicted for every configuration, and the few to run.
real_runs     those few through lm-eval, measured and scored.
fidelity      whether the scores held.
confirm       the fastest once more, on documents that the search has not seen.
tune          all of this, in order.
output        the configuration with its evidence, the record, the table.
"""
