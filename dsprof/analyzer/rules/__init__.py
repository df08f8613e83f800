"""The rules: what is known of each code is one record (`rule.Rule`), in the file that finds it.

To add one, add a file with RULES to a folder here; nothing else has to know of it.

    rule       the record
    registry   all records
    run/  data/  comm/  pipeline/  memory/  compute/   the families; a folder's docstring says what is where
    missing_collectors   what cannot be judged since a collector was not there
    base       what rules share
"""
