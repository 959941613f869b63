"""`fly report`: finished runs as one HTML page that needs no network.

summary.py, points.py, comparison.py, documents.py and traces.py turn runs into plain JSON values,
page.py puts those with the page's own CSS and JavaScript into one file. The page draws; it computes
no statistics.
"""
