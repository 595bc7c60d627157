"""Compare runs with each other, and show one on a page.

compare_runs     scripts/compare_runs.py
report           scripts/report.py
comparison_text  the comparison as text, Markdown and JSON
plots            its figures
page             the HTML page of a run or a comparison; page.html is its template
outliers         the steps that stand out
"""
