"""`fly tune`: which configuration of a pair decodes fastest on this machine (docs/tune.md).

baseline  the target alone over the documents: texts, scores, speed.
replay    both models along those texts: what the draft would propose and the target would say.
simulate  rounds of any configuration walked over a replay; no model.
costs     seconds of passes on this machine.
search    a speed predicted for every configuration, and the few to run.
live      those few through lm-eval, measured and scored.
output    the configuration with its evidence, the record, the table.
"""
